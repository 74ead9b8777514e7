"""Rows K6 to K9: damaged checkpoints, full disks, another computation, a second process."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gspo.checkpoint import folder as checkpoint
from tests.faults import faults
from tests.faults.kill_rows import Bench, make_model_apart, with_bench
from tests.faults.processes import drop_capabilities
from tests.faults.row import Check
from tests.support.small_run import final_state


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "flipped": _flip,
    "halved": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "deleted": lambda path: path.unlink(),
}


def damaged_files(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """K6: every file of the newest checkpoint damaged in four ways; the older one is used, and a message says so."""
    bench.reference()
    bench.start("whole", prepare=lambda m: faults.kill_at(m, "update", 9)).wait()
    run = bench.folder / "whole"
    newest = checkpoint.all_steps(run / "checkpoints")[-1]
    files = [p for p in sorted(newest.rglob("*")) if p.is_file()]
    missed, cases = [], 0
    for file in files:
        for how, damage in DAMAGES.items():
            cases += 1
            with _spared(file):
                damage(file)
                path, found = checkpoint.latest(run / "checkpoints")
                if path is None or path == newest or [d.path for d in found] != [newest]:
                    missed.append(f"{file.name} {how}")
    resumed = 0
    names = ("model.safetensors", "optimizer.safetensors", "state.json", "MANIFEST.json")
    for number, (name, how) in enumerate(zip(names, DAMAGES)):
        copy = bench.folder / f"damaged-{number}"
        shutil.copytree(run, copy)
        DAMAGES[how](next((copy / "checkpoints" / newest.name).rglob(name)))
        same = bench.finish(copy.name)
        resumed += same and "DAMAGED" in (bench.folder / f"{copy.name}.log").read_text()
    passed = not missed and resumed == len(names)
    return (passed, f"{cases - len(missed)}/{cases} detected, {resumed}/{len(names)} resumed to the same bits, loudly")


class _spared:
    """Puts a file back as it was."""

    def __init__(self, path: Path) -> None:
        self.path, self.data = path, path.read_bytes()

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        self.path.write_bytes(self.data)


def full_disk(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """K7: writes that fail at several sizes, and a folder that cannot be written."""
    bench.reference()
    sizes = (12_000, 40_000, 80_000, 120_000)
    bad = []
    for size in sizes:
        name = f"full-{size}"
        bench.start(name, prepare=lambda m: faults.kill_at(m, "update", 5)).wait()
        before = checkpoint.latest(bench.folder / name / "checkpoints")[0]

        def limit(module: Any, size: int = size) -> None:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        child = bench.start(name, prepare=limit)
        code, after = child.wait(), checkpoint.latest(bench.folder / name / "checkpoints")[0]
        clear = "File too large" in child.output()
        if code != 6 or after is None or before is None or after.name < before.name or not clear:
            bad.append(f"limit {size}")
        elif not bench.finish(name):
            bad.append(f"after limit {size}")
    bad += _read_only(bench)
    return not bad, "last good checkpoint loads, error clear" if not bad else f"not: {bad}"


def _read_only(bench: Bench) -> list[str]:
    name = "read-only"
    bench.start(name, prepare=lambda m: faults.kill_at(m, "update", 5)).wait()
    folders = [bench.folder / name / "checkpoints", bench.folder / name / "groups"]
    for folder in folders:
        folder.chmod(0o555)
    child = bench.start(name, prepare=lambda m: drop_capabilities())
    code = child.wait()
    for folder in folders:
        folder.chmod(0o755)
    if code != 6 or "Permission denied" not in child.output():
        return ["read-only folder"]
    return [] if bench.finish(name) else ["after a read-only folder"]


def another_computation(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """K8: a resume with another shape, data, seed, group size or thread count is refused by name."""
    bench.start("other", prepare=lambda m: faults.kill_at(m, "update", 5)).wait()
    before = final_state(bench.folder / "other")
    wrong = make_model_apart(bench.folder / "wrong-shape", hidden_size=16)
    cases = {
        "actor_rollout_ref.model.path": f"actor_rollout_ref.model.path={wrong}",
        "data.num_train_samples": "data.num_train_samples=32",
        "trainer.seed": "trainer.seed=9",
        "actor_rollout_ref.rollout.n": "actor_rollout_ref.rollout.n=2",
        "trainer.num_threads": "trainer.num_threads=2",
    }
    bad = []
    for number, (key, override) in enumerate(cases.items()):
        child = bench.start("other", override)
        code, output = child.wait(), child.output()
        if code != 2 or "cannot be resumed" not in output or key not in output:
            bad.append(key)
        child.log.rename(child.log.with_suffix(f".{number}"))
    same_folder = _same_path_other_weights(bench)
    kept = final_state(bench.folder / "other") == before
    return (
        not bad and kept and same_folder,
        f"{len(cases) + 1 - len(bad) - (not same_folder)}/6 refused; run untouched: {kept}",
    )


def _same_path_other_weights(bench: Bench) -> bool:
    """The folder that the config names now holds data of another content: found by fingerprint, not by name."""
    data = bench.folder / "rows.jsonl"
    row = '{{"prompt": [{{"role": "user", "content": "{}+1="}}], "data_source": "arithmetic", "reward_model": {{"ground_truth": "2"}}}}\n'
    data.write_text("".join(row.format(i) for i in range(64)))
    settings = (f"data.train_files={data}", "data.val_files=arithmetic", "data.num_train_samples=null")
    bench.start("rows", *settings, prepare=lambda m: faults.kill_at(m, "update", 5)).wait()
    data.write_text("".join(row.format(i + 1) for i in range(64)))
    child = bench.start("rows", *settings)
    return child.wait() == 2 and "training data" in child.output()


def second_process(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """K9: two processes on one run folder."""
    bench.reference()
    first = bench.start("shared")
    while not (bench.folder / "shared" / "metrics.jsonl").exists():
        if os.waitpid(first.pid, os.WNOHANG)[0]:
            return False, "the first process ended early"
    second = bench.start("shared")
    refused = second.wait() == 2 and "in use by process" in second.output()
    same = first.wait() == 0 and final_state(bench.folder / "shared") == bench.reference()
    return refused and same, f"second refused: {refused}; first undisturbed: {same}"


ROWS: dict[str, Check] = {
    "K6": with_bench(damaged_files, "K6", "every checkpoint file flipped, halved, emptied, deleted"),
    "K7": with_bench(full_disk, "K7", "disk full at several sizes; read-only folder"),
    "K8": with_bench(another_computation, "K8", "resume with another shape, data, seed, group size, threads"),
    "K9": with_bench(second_process, "K9", "two processes on one run folder"),
}
