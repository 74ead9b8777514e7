"""Rows C1 to C3: checkpoints that lie are refused by name, an older one is used, and nothing is lost without a word."""

from __future__ import annotations

import random
import shutil

from gspo.checkpoint import folder as checkpoint
from tests.faults import faults
from tests.faults.hostile_checkpoints import LYING, make_lie
from tests.faults.kill_rows import Bench, with_bench
from tests.faults.processes import seconds_of_children
from tests.faults.row import Check

NUM_RESUMED = 16  # of those that lie, drawn by the seed: a whole resume takes seconds
SECONDS = 30.0  # of processor time for a whole resume, which does not depend on what else the machine does


def _stopped_run(bench: Bench) -> None:
    bench.reference()
    bench.start("whole", prepare=lambda m: faults.kill_at(m, "update", 9)).wait()


def older_is_used(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """C1: the newest checkpoint lies in one of many ways; the run names it, goes on from the older one, to the same bits."""
    _stopped_run(bench)
    names = rng.sample(sorted(LYING), NUM_RESUMED)
    bad, slowest = [], 0.0
    for name in names:
        run = bench.folder / name
        shutil.copytree(bench.folder / "whole", run)
        newest = checkpoint.all_steps(run / "checkpoints")[-1]
        make_lie(newest, name)
        before = seconds_of_children()
        same = bench.finish(name)
        seconds = seconds_of_children() - before
        slowest = max(slowest, seconds)
        text = (bench.folder / f"{name}.log").read_text()
        if not same or "DAMAGED" not in text or LYING[name][1] not in text or seconds > SECONDS:
            bad.append(f"{name}: same bits {same}, {seconds:.0f} s, {text.strip()[-200:]!r}")
        shutil.rmtree(run)
    detail = (
        "; ".join(bad)
        or f"{len(names)} of {len(names)} named, resumed to the same bits in at most {slowest:.1f} s of one core"
    )
    return not bad, detail


def refused_when_alone(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """C2: without an older checkpoint each is refused by name, and the run is left as it is."""
    _stopped_run(bench)
    names = sorted(LYING)
    rng.shuffle(names)
    bad = []
    for name in names:
        run = bench.folder / name
        shutil.copytree(bench.folder / "whole", run)
        *older, newest = checkpoint.all_steps(run / "checkpoints")
        for path in older:
            shutil.rmtree(path)
        make_lie(newest, name)
        before = (run / "metrics.jsonl").read_bytes()
        child = bench.start(name)
        code, text = child.wait(), child.output()
        if code not in (2, 6) or LYING[name][1] not in text or "Traceback" in text:
            bad.append(f"{name}: exit {code}, {text.strip()[-200:]!r}")
        elif (run / "metrics.jsonl").read_bytes() != before:
            bad.append(f"{name}: the metrics were changed")
        shutil.rmtree(run)
    return not bad, "; ".join(bad) or f"{len(names)} of {len(names)} refused by name, exit 2 or 6, run untouched"


def reset_is_said(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """C3: with trainer.resume_missing=reset, missing optimiser state starts at 0, and a message says so."""
    _stopped_run(bench)
    bad = []
    for name in ("no_moments", "second_moments_missing", "moments_unexpected", "moments_int8"):
        run = bench.folder / name
        shutil.copytree(bench.folder / "whole", run)
        make_lie(checkpoint.all_steps(run / "checkpoints")[-1], name)
        child = bench.start(name, "trainer.resume_missing=reset")
        code, text = child.wait(), child.output()
        if code != 0 or "trainer.resume_missing=reset: training/optimizer" not in text or "DAMAGED" in text:
            bad.append(f"{name}: exit {code}, {text.strip()[-200:]!r}")
    return not bad, "; ".join(bad) or "4 of 4 go on from the newest checkpoint and say what was reset"


ROWS: dict[str, Check] = {
    "C1": with_bench(
        older_is_used, "C1", f"{NUM_RESUMED} of {len(LYING)} checkpoints that lie, with an older good one"
    ),
    "C2": with_bench(refused_when_alone, "C2", f"{len(LYING)} checkpoints that lie, alone"),
    "C3": with_bench(reset_is_said, "C3", "missing optimiser state with trainer.resume_missing=reset"),
}
