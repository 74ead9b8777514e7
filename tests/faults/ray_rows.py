"""Rows Y1 to Y3: ten deaths each of Ray's parts, against a run on Ray of the same length in which nothing died.

Rollout actors and ranks are replaced while the run goes on. The head of a cluster cannot be: each of its deaths ends
the run, which the same command continues.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gspo.exit_codes import EXIT_WORKERS_LOST
from tests.distributed.ray.fragile import fragile_rank, fragile_rollout, mark
from tests.distributed.ray.program import Program
from tests.distributed.ray.waiting import wait_until
from tests.faults.processes import Child
from tests.faults.row import Check, Row
from tests.support.small_run import config, final_state

KILLS = 10
STEPS = KILLS + 2
HEAD_STEPS = 400  # a run trains on for a while after the death of the head
EMBEDDED = Path("embedded")
TWO_WORKERS = "actor_rollout_ref.rollout.num_workers=2"
HEAD_SECONDS = 60.0  # within which the death of the head ends a run


def rollout_actors(folder: Path, rng: random.Random) -> tuple[bool, str]:
    """Y1: a rollout actor dies in each of ten steps, with groups in flight."""
    marks = mark(folder / "marks", *(f"version-{n}" for n in range(1, KILLS + 1)))
    return _compare(folder, marks, lambda roles: {roles.Rollout: fragile_rollout(marks)}, TWO_WORKERS)


def ranks(folder: Path, rng: random.Random) -> tuple[bool, str]:
    """Y2: a trainer rank dies in each of ten steps, after its update and before the checkpoint."""
    marks = mark(folder / "marks", *(f"update-{n}" for n in range(1, KILLS + 1)))
    return _compare(folder, marks, lambda roles: {roles.ActorRollout: fragile_rank(marks)})


def _compare(folder: Path, marks: Path, classes: Callable[[Any], dict[Any, Any]], *overrides: str) -> tuple[bool, str]:
    plain = _train(folder, "plain", lambda roles: None, *overrides)
    killed = _train(folder, "killed", classes, *overrides)
    if plain[0] or killed[0]:
        return False, f"exit {plain[0]} and {killed[0]}: {(killed[1] if killed[0] else plain[1])[-500:]}"
    deaths = KILLS - len(list(marks.iterdir()))
    other = _differences(folder / "plain", folder / "killed")
    detail = f"{deaths} deaths in {STEPS} steps; " + (f"other: {other}" if other else "identical bits")
    return not other and deaths == KILLS, detail


def _train(folder: Path, name: str, classes: Callable[[Any], Any], *overrides: str) -> tuple[int, str]:
    """Train on a local Ray in a child process; its exit code and output."""

    def work() -> int:
        from gspo.cluster import RayPPOTrainerWithSampling, Role

        settings = (f"trainer.total_training_steps={STEPS}", "reward.num_workers=1", f"trainer.experiment_name={name}")
        resolved = config(folder, EMBEDDED, *settings, *overrides)
        return 0 if RayPPOTrainerWithSampling(resolved, None, classes(Role), None).fit()["steps"] == STEPS else 1

    child = Child(work, folder / f"{name}.log")
    return child.wait(3600), child.output()


def _differences(one: Path, other: Path) -> list[str]:
    a, b = final_state(one), final_state(other)
    return [part for part in sorted(a.keys() | b.keys()) if a.get(part) != b.get(part)]


def heads(folder: Path, rng: random.Random) -> tuple[bool, str]:
    """Y3: the head of the cluster (its GCS) dies ten times; each time exit 8, no process left, and the run goes on."""
    settings = (f"trainer.total_training_steps={HEAD_STEPS}", "trainer.save_freq=1")
    plain, killed = folder / "plain", folder / "killed"
    plain.mkdir()
    killed.mkdir()
    if (code := (program := Program(plain, *settings)).end(900)) != 0:
        return False, f"the reference ended with {code}: {program.text[-300:]}"
    ends = [_kill_head(Program(killed, *settings), killed, rng) for _ in range(KILLS)]
    bad = [problem for problem, _ in ends if problem]
    slowest = max(seconds for _, seconds in ends)
    if (code := (program := Program(killed, *settings)).end(900)) != 0:
        bad.append(f"the last start ended with {code}: {program.text[-200:]!r}")
    elif other := _differences(plain / "run", killed / "run"):
        bad.append(f"other: {other}")
    detail = f"{KILLS} deaths, each exit {EXIT_WORKERS_LOST} with the cause within {slowest:.0f} s; identical bits"
    return not bad and slowest <= HEAD_SECONDS, "; ".join(bad) or detail


def _kill_head(program: Program, folder: Path, rng: random.Random) -> tuple[str, float]:
    """Kill the head once the run has trained a step: the problem, if there is one, and the seconds to the run's end."""
    before = _num_lines(folder)
    wait_until(lambda: _num_lines(folder) > before or program.process.poll() is not None, 240)
    time.sleep(rng.uniform(0.0, 1.0))
    pids = program.pids("gcs_server")
    if not pids:
        return f"there is no head, exit {program.end()}: {program.text[-200:]!r}", 0.0
    os.kill(pids[0], signal.SIGKILL)
    died = time.monotonic()
    code = program.end(300)
    is_named = code == EXIT_WORKERS_LOST and "has died" in program.text
    return "" if is_named else f"exit {code}: {program.text[-200:]!r}", time.monotonic() - died


def _num_lines(folder: Path) -> int:
    file = folder / "run" / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def _in_folder(check: Callable[[Path, random.Random], tuple[bool, str]], id: str, title: str) -> Check:
    def run(seed: int) -> Row:
        folder = Path(tempfile.mkdtemp(prefix="gspo-scorecard-"))
        try:
            return Row(id, title, *check(folder, random.Random(f"{seed}/{id}")))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    return run


ROWS: dict[str, Check] = {
    "Y1": _in_folder(rollout_actors, "Y1", f"Ray: {KILLS} rollout actors killed"),
    "Y2": _in_folder(ranks, "Y2", f"Ray: {KILLS} trainer ranks killed"),
    "Y3": _in_folder(heads, "Y3", f"Ray: the head of the cluster killed {KILLS} times"),
}
