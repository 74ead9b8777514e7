"""Rows F6 and K1A: rollout workers killed and stopped under a run; an asynchronous trainer killed at random.

Workers in step with each other give the same bits through every failure. Asynchronous ones do not promise bits: there
every group must be recorded once, and none may be trained on too late.
"""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults import audit
from tests.faults.kill_rows import Bench, with_bench
from tests.faults.processes import Child
from tests.faults.row import Check
from tests.support.small_run import final_state

ROLLOUT = "actor_rollout_ref.rollout."
IN_STEP = (f"{ROLLOUT}num_workers=2", "data.gen_batch_size=12", "data.max_response_length=12")
BOUND = 2
ASYNC = (
    f"{ROLLOUT}mode=async",
    f"{ROLLOUT}max_head_offpolicyness={BOUND}",
    f"{ROLLOUT}worker_timeout=5",
    "data.max_response_length=12",
    "trainer.total_training_steps=16",
    "trainer.val_before_train=false",
)
KILLS = 10


def rollout_worker_killed(bench: Bench, rng: random.Random, kills: int = KILLS) -> tuple[bool, str]:
    """F6: workers killed between two engine steps, and free-running ones killed or stopped at any time."""
    in_step = _killed_in_step(bench, rng, kills)
    free = _struck_while_free(bench, rng, kills)
    return in_step[0] and free[0], f"in step: {in_step[1]}; async: {free[1]}"


def _killed_in_step(bench: Bench, rng: random.Random, kills: int) -> tuple[bool, str]:
    reference = bench.reference(*IN_STEP)
    runs = -(-kills // 4)
    same = struck = 0
    for number in range(runs):
        calls = sorted(rng.sample(range(2, 11), min(4, kills - 4 * number)))
        name = f"in-step-{number}"
        log = bench.folder / f"{name}.struck"
        child = bench.start(name, *IN_STEP, prepare=functools.partial(_strike_at_steps, calls=calls, log=log))
        code = child.wait(300)
        struck += len(log.read_text().splitlines()) if log.exists() else 0
        same += code == 0 and final_state(bench.folder / name) == reference and not _left(child.pid)
    return same == runs and struck == kills, f"{same}/{runs} runs identical after {struck} kills"


def _struck_while_free(bench: Bench, rng: random.Random, kills: int) -> tuple[bool, str]:
    bad: list[str] = []
    if (code := (child := bench.start("free-undisturbed", *ASYNC)).wait(300)) != 0:
        return False, f"the undisturbed run ended with {code}: {child.output()[-300:]}"
    undisturbed = bench.folder / "free-undisturbed"
    bad += [f"undisturbed: {problem}" for problem in _account(undisturbed, child.pid)]
    struck = runs = 0
    while struck < kills and runs < kills:
        name = f"free-{runs}"
        log = bench.folder / f"{name}.struck"
        strike = functools.partial(_strike_while_training, seed=rng.random(), log=log, most=kills - struck)
        child = bench.start(name, *ASYNC, prepare=strike)
        code = child.wait(300)
        struck += len(log.read_text().splitlines()) if log.exists() else 0
        runs += 1
        if code != 0:
            bad.append(f"{name}: exit {code}")
        bad += [f"{name}: {problem}" for problem in _account(bench.folder / name, child.pid)]
        bad += [f"{name}: {problem}" for problem in _unlike(bench.folder / name, undisturbed)]
    detail = f"{runs} runs, every group accounted for after {struck} kills and stops, as many trained as undisturbed"
    return not bad and struck >= kills, detail if not bad else f"{struck} strikes; not: {bad}"


def trainer_killed(bench: Bench, rng: random.Random, kills: int = KILLS, runs: int = 2) -> tuple[bool, str]:
    """K1A: the trainer of an asynchronous run killed at random moments, resumed, and let end."""
    bad: list[str] = []
    landed = 0
    for run in range(runs):
        name = f"async-{run}"
        for kill in range(kills // runs):
            child = bench.start(name, *ASYNC)
            if kill % 2 == 0:  # while it works; the others while it starts or whenever it may be
                _wait_for_row(bench.folder / name, child)
            landed += child.kill_after(rng.uniform(0.0, 1.5 if kill % 2 == 0 else 8.0))
            if left := _left(child.pid):
                bad.append(f"{name}: processes {left} were left")
        child = bench.start(name, *ASYNC)
        if (code := child.wait(300)) != 0:
            bad.append(f"{name}: exit {code}")
        bad += [f"{name}: {problem}" for problem in _account(bench.folder / name, child.pid)]
    detail = f"{runs} runs with every group accounted for after {landed} kills, lag at most {BOUND}"
    return not bad and landed >= 0.8 * kills, detail if not bad else f"{landed} kills; not: {bad}"


def _account(run: Path, pid: int) -> list[str]:
    """What is wrong with a finished asynchronous run."""
    bad = audit.problems(run)
    steps = [step for step, group in audit.recorded(run) if group["fate"] == "kept"]
    if sorted(set(steps)) != list(range(1, 17)) or len(steps) != 16 * 4:
        bad.append(f"{len(steps)} groups trained in {len(set(steps))} steps, expected 64 in 16")
    if max(audit.staleness(run), default=0) > BOUND:
        bad.append(f"a group lagged {max(audit.staleness(run))} versions")
    if left := _left(pid):
        bad.append(f"processes {left} were left")
    return bad


def _unlike(run: Path, undisturbed: Path) -> list[str]:
    """In what a disturbed run differs from one of the same length: groups trained per step, and the last version."""
    trained = [Counter(step for step, g in audit.recorded(each) if g["fate"] == "kept") for each in (run, undisturbed)]
    last = [json.loads((each / "metrics.jsonl").read_text().splitlines()[-1])["step"] for each in (run, undisturbed)]
    return [
        f"{what}: {ours}, undisturbed {theirs}"
        for what, (ours, theirs) in {"groups per step": trained, "last step": last}.items()
        if ours != theirs
    ]


def _strike_at_steps(module: Any, calls: list[int], log: Path) -> None:
    """Kill a worker, each in turn, right before these steps of the engine."""

    def arm(trainer: Any) -> None:
        fleet, done, count = trainer.parts.engine, trainer.parts.engine.step, [0]

        def step() -> Any:
            count[0] += 1
            if count[0] in calls:
                slots = fleet.slots
                _strike(slots[count[0] % len(slots)].connection.pid, signal.SIGKILL, log)
            return done()

        fleet.step = step

    _after_init(module, arm)


def _strike_while_training(module: Any, seed: float, log: Path, most: int) -> None:
    """Kill or stop a worker a random moment after each training step, if it is up and has made progress."""

    def arm(trainer: Any) -> None:
        rng, fleet, done = random.Random(seed), trainer.parts.engine, trainer.train_step
        left = [most]

        def strike() -> None:
            slot = fleet.slots[0]
            if left[0] and slot.is_ready and not slot.failures and slot.connection.alive:
                left[0] -= 1
                _strike(slot.connection.pid, rng.choice((signal.SIGKILL, signal.SIGSTOP)), log)

        def train_step() -> None:
            done()
            timer = threading.Timer(rng.uniform(0.0, 0.3), strike)
            timer.daemon = True
            timer.start()

        trainer.train_step = train_step

    _after_init(module, arm)


def _strike(pid: int, number: int, log: Path) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
    with log.open("a") as file:
        file.write(f"{signal.Signals(number).name} {pid}\n")


def _after_init(module: Any, arm: Callable[[Any], None]) -> None:
    built = module.Trainer.__init__

    @functools.wraps(built)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        built(self, *args, **kwargs)
        arm(self)

    module.Trainer.__init__ = init


def _wait_for_row(run: Path, child: Child, seconds: float = 120.0) -> None:
    """Wait until a run has trained a step since its start, or ended."""
    file, end = run / "metrics.jsonl", time.monotonic() + seconds
    before = file.stat().st_mtime if file.exists() else 0.0
    while time.monotonic() < end:
        if os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        if file.exists() and file.stat().st_mtime > before and file.stat().st_size:
            return
        time.sleep(0.01)


def _left(pid: int, seconds: float = 10.0) -> list[int]:
    """Rollout workers that a trainer left behind, after a moment in which they may end."""
    end = time.monotonic() + seconds
    while (found := _workers_of(pid)) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def _workers_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if b"gspo.rollout.workers.process_main" in words and str(pid).encode() in words:
                found.append(int(entry.name))
    return found


ROWS: dict[str, Check] = {
    "F6": with_bench(rollout_worker_killed, "F6", "rollout workers killed and stopped, 10 each"),
    "K1A": with_bench(trainer_killed, "K1A", "async: SIGKILL at random, 5 per run, 2 runs"),
}
