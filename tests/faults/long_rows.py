"""Row L3: a day's run in miniature, 10,000 tiny steps: memory, descriptors, threads and checkpoints do not grow."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

from tests.faults.kill_rows import Bench, with_bench
from tests.faults.row import Check

STEPS = int(os.environ.get("GSPO_LONG_STEPS", "10000"))
EVERY = max(1, STEPS // 50)
MEMORY = 24 << 20  # bytes that the last fifth may have more than the second fifth
TINY = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=100",
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
    """Memory (the least of each fifth, so that a garbage collection does not matter), descriptors, threads, checkpoints."""
    seen = bench.folder / "seen.txt"
    child = bench.start("long", *TINY, prepare=lambda module: _watch(module, seen))
    code = child.wait(timeout=7200)
    rows = [tuple(map(int, line.split())) for line in seen.read_text().splitlines()]
    if code != 0 or len(rows) < 20:
        return False, f"exit {code} after {len(rows)} samples: {child.output()[-300:]}"
    fifth = len(rows) // 5
    early, late = rows[fifth : 2 * fifth], rows[-fifth:]
    growth = min(r[1] for r in late) - min(r[1] for r in early)
    counts = {name: (max(r[i] for r in early), max(r[i] for r in late)) for name, i in _COUNTS.items()}
    flat = growth < MEMORY and all(after <= before + 1 for before, after in counts.values())
    kept = len(list((bench.folder / "long" / "checkpoints").iterdir()))
    detail = ", ".join(f"{name} {before} → {after}" for name, (before, after) in counts.items())
    return flat and kept <= 2, f"{STEPS:,} steps: memory {growth / (1 << 20):+.1f} MiB, {detail}, {kept} checkpoints"


_COUNTS = {"descriptors": 2, "threads": 3, "children": 4}


def _watch(module: Any, file: Path) -> None:
    """Write memory, descriptors, threads and child processes every few steps."""
    from gspo.runs.folder import RunFolder

    append, count = RunFolder.append_metrics, [0]

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = append(self, *args, **kwargs)
        count[0] += 1
        if count[0] % EVERY == 0:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            children = sum(len(p.read_text().split()) for p in Path("/proc/self/task").glob("*/children"))
            facts = (count[0], pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd")))
            with open(file, "a") as out_file:
                print(*facts, threading.active_count(), children, file=out_file)
        return out

    RunFolder.append_metrics = counted


ROWS: dict[str, Check] = {"L3": with_bench(many_steps, "L3", f"{STEPS:,} tiny steps")}
