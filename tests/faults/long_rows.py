"""Row L3: a day's run in miniature, 10,000 tiny steps: memory, descriptors, threads and disk do not grow."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from pathlib import Path
from typing import Any, NamedTuple

from tests.faults.kill_rows import Bench, with_bench
from tests.faults.row import Check

STEPS = int(os.environ.get("GSPO_LONG_STEPS", "10000"))
EVERY = max(1, STEPS // 50)
MEMORY = 8 << 20  # bytes that the last fifth may have more than the second fifth
DISK = 1.1  # what the last fifth may have on disk, as a multiple of the second fifth
TINY = (
    f"trainer.total_training_steps={STEPS}",
    f"trainer.save_freq={max(1, STEPS // 100)}",
    "trainer.test_freq=1000",
    "trainer.log_val_generations=0",
    "data.num_val_samples=4",
    "data.train_batch_size=1",
    "data.max_response_length=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "actor_rollout_ref.rollout.n=2",
    "algorithm.filter_groups.enable=false",
)


def many_steps(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """Memory (the least of each fifth, so that a garbage collection does not matter), descriptors, threads, disk."""
    seen = bench.folder / "seen.txt"
    child = bench.start("long", *TINY, prepare=lambda module: _watch(module, seen))
    code = child.wait(timeout=7200)
    rows = [Sample(*map(int, line.split())) for line in seen.read_text().splitlines()]
    if code != 0 or len(rows) < 20:
        return False, f"exit {code} after {len(rows)} samples: {child.output()[-300:]}"
    fifth = len(rows) // 5
    early, late = rows[fifth : 2 * fifth], rows[-fifth:]
    growth = min(r.memory for r in late) - min(r.memory for r in early)
    counts = {n: (max(getattr(r, n) for r in early), max(getattr(r, n) for r in late)) for n in COUNTS}
    states = [max(r.state_bytes for r in part) for part in (early, late)]
    per_step = [_bytes_per_step(part) for part in (early, late)]
    flat = growth < MEMORY and all(after <= before + 1 for before, after in counts.values())
    flat_disk = states[1] <= DISK * states[0] and per_step[1] <= DISK * per_step[0]
    detail = ", ".join(f"{name} {before} → {after}" for name, (before, after) in counts.items())
    disk = f"state on disk {states[0]:,} → {states[1]:,} bytes, records {per_step[0]:,.0f} → {per_step[1]:,.0f} bytes per step"
    return flat and flat_disk, f"{STEPS:,} steps: memory {growth / (1 << 20):+.1f} MiB, {detail}, {disk}"


class Sample(NamedTuple):
    """What a run holds after a step. Records are the files with lines of every step; the rest on disk is its state."""

    step: int
    memory: int
    descriptors: int
    threads: int
    children: int
    state_bytes: int
    record_bytes: int


COUNTS = ("descriptors", "threads", "children")
RECORDS = ("groups", "evals", "metrics.jsonl")


def _bytes_per_step(part: list[Sample]) -> float:
    return (part[-1].record_bytes - part[0].record_bytes) / (part[-1].step - part[0].step)


def _watch(module: Any, file: Path) -> None:
    """Write a sample every few steps."""
    from gspo.runs.folder import RunFolder

    append, count = RunFolder.append_metrics, [0]

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = append(self, *args, **kwargs)
        count[0] += 1
        if count[0] % EVERY == 0:
            with open(file, "a") as out_file:
                print(*_sample(count[0], self.path), file=out_file)
        return out

    RunFolder.append_metrics = counted


def _sample(step: int, run: Path) -> Sample:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    children = sum(len(p.read_text().split()) for p in Path("/proc/self/task").glob("*/children"))
    memory, descriptors = pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))
    sizes = {True: 0, False: 0}
    for path in run.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a checkpoint that is being written, or is deleted now
            sizes[path.relative_to(run).parts[0] in RECORDS] += path.stat().st_size if path.is_file() else 0
    return Sample(step, memory, descriptors, threading.active_count(), children, sizes[False], sizes[True])


ROWS: dict[str, Check] = {"L3": with_bench(many_steps, "L3", f"{STEPS:,} tiny steps")}
