"""Rows P1 to P3: signals in every phase of a run, a clock that jumps, and no room on the disk for any single file."""

from __future__ import annotations

import errno
import functools
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import faults
from tests.faults.kill_rows import Bench, with_bench
from tests.faults.row import Check
from tests.support.small_run import final_state

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def _once(number: int) -> Callable[[], None]:
    """A function that sends a signal to this process the first time it is called."""
    left = [True]

    def send() -> None:
        if left:
            left.clear()
            os.kill(os.getpid(), number)

    return send


def _while_building(module: Any, send: Callable[[], None]) -> None:
    """Between the models and the first step, where a run compiles."""
    from gspo.loop import training_run

    original = training_run.TrainingRun._open

    @functools.wraps(original)
    def opened(self: Any, *args: Any, **kwargs: Any) -> Any:
        send()
        return original(self, *args, **kwargs)

    training_run.TrainingRun._open = opened


def _while_reporting(module: Any, send: Callable[[], None]) -> None:
    from gspo.report import overview

    original = overview.overview
    overview.overview = lambda run: (send(), original(run))[1]


def _at_point(point: str, count: int) -> Callable[[Any, Callable[[], None]], None]:
    return lambda module, send: faults.call_at(module, point, count, send)


PHASES: dict[str, Callable[[Any, Callable[[], None]], None]] = {
    "building": _while_building,
    "first evaluation": _at_point("evaluation", 1),
    "generation": _at_point("rollout", 5),
    "update": _at_point("update", 3),
    "saving": _at_point("save:model", 2),
    "after a save": _at_point("save:renamed", 2),
    "last step": _at_point("update", 12),
    "last evaluation": _at_point("evaluation", 40),
    "report": _while_reporting,
}


def signals_by_phase(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """P1: SIGTERM and SIGINT in each phase: a documented end without a traceback, and the same bits afterwards."""
    bench.reference()
    bad, cases = [], 0
    for phase, number in itertools.product(PHASES, SIGNALS):
        cases += 1
        name = f"{phase.replace(' ', '-')}-{int(number)}"
        child = bench.start(name, prepare=lambda m, p=phase, n=number: PHASES[p](m, _once(n)))
        code, output = child.wait(), child.output()
        ended = code in (128 + number, -number) or (code == 0 and phase in ("report", "last evaluation", "last step"))
        if not ended or "Traceback" in output:
            bad.append(f"{phase} {signal.Signals(number).name}: exit {code}")
        elif not bench.finish(name):
            bad.append(f"{phase} {signal.Signals(number).name}: other bits")
    return not bad, f"{cases - len(bad)}/{cases} ended as documented, with the same bits" + (
        f"; not: {bad}" if bad else ""
    )


def jumping_clock(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """P2: the wall clock jumps by hours, back and forth, at every reading."""
    bench.reference()
    jumps = [rng.uniform(-1e6, 1e6) for _ in range(97)]

    def jump(module: Any) -> None:
        real, offsets = time.time, itertools.cycle(jumps)
        time.time = lambda: real() + next(offsets)
        time.time_ns = lambda: int(time.time() * 1e9)

    code = bench.start("clock", prepare=jump).wait()
    same = code == 0 and final_state(bench.folder / "clock") == bench.reference()
    rows = [json.loads(line) for line in (bench.folder / "clock" / "metrics.jsonl").read_text().splitlines()]
    times = [v for row in rows for k, v in row.items() if k.startswith("timing_s/")]
    sensible = bool(times) and all(0 <= v < 600 for v in times)
    return same and sensible, f"identical: {same}; {len(times)} times of stages, all between 0 and 600 s: {sensible}"


# The end of a file's path → whether the run may go on without it.
WRITERS = {
    "config.yaml": False,
    "config.json": False,
    "environment.json": False,
    "metrics.jsonl": False,
    "groups/step-000002.jsonl.gz": False,
    "groups/index.jsonl": True,
    "evals/step-000006.jsonl.gz": False,
    "training/state.json": False,
    "MANIFEST.json": False,
    "result.json": False,
    "report.html": True,
    "RUN.md": True,
    "alarms.jsonl": False,
}


def no_room(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """P3: the disk is full when one file is written: exit 6 and its cause, or a run without a page; then the same bits."""
    bench.reference()
    bad = []
    for number, (ending, may_go_on) in enumerate(WRITERS.items()):
        name = f"full-{number}"
        child = bench.start(name, prepare=lambda m, e=ending: (_raise_alarm(e), refuse_writes(e)))
        code, output = child.wait(), child.output()
        named = "No space left on device" in output or ending.endswith("index.jsonl")
        if code != (0 if may_go_on else 6) or not named or "Traceback" in output:
            bad.append(f"{ending}: exit {code}, named {named}")
        elif not bench.finish(name):
            bad.append(f"{ending}: other bits afterwards")
    return not bad, f"{len(WRITERS) - len(bad)}/{len(WRITERS)} writers" + (f"; not: {bad}" if bad else "")


def _raise_alarm(ending: str) -> None:
    """Let a run whose file of alarms is refused have an alarm."""
    from gspo.loop.guards.alarms import RULES

    if ending == "alarms.jsonl":
        RULES["made"] = lambda rows: "a made alarm" if rows[-1]["step"] == 3 else None


def refuse_writes(ending: str) -> None:
    """From now on this process cannot open a file with this end of its path, or its temporary form, for writing."""
    folder, _, file = ending.rpartition("/")

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes | Path):
            return
        path, flags = Path(os.fsdecode(arguments[0])), arguments[2] or 0
        writes = flags & (os.O_WRONLY | os.O_RDWR)
        if writes and file in path.name and (not folder or path.parent.name == folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    sys.addaudithook(watch)


ROWS: dict[str, Check] = {
    "P1": with_bench(signals_by_phase, "P1", "SIGTERM and SIGINT in nine phases"),
    "P2": with_bench(jumping_clock, "P2", "the wall clock jumps at every reading"),
    "P3": with_bench(no_room, "P3", "no room on the disk for one file, for every writer"),
}
