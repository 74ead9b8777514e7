"""Rows T1 to T3: rollouts of several turns that are killed, that hang, and that are many."""

from __future__ import annotations

import os
import random
import time
from contextlib import closing
from typing import Any

from gspo.processes import children_of
from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.types import Prompt
from tests.faults import faults
from tests.faults.kill_rows import Bench, with_bench
from tests.faults.row import Check, Row
from tests.loop.episode_run import OVERRIDES
from tests.rollout.episodes.world import ENDS, make_episodes, make_pool

DEADLINE = 6.0


def kills_in_turns(bench: Bench, rng: random.Random) -> tuple[bool, str]:
    """T1: SIGKILL while environments answer, twice per run, then let it end."""
    settings = OVERRIDES
    bench.reference(*settings)
    same = landed = 0
    for run in range(4):
        name = f"turn-{run}"
        for _ in range(2):
            count = rng.randint(10, 60)
            landed += bench.start(name, *settings, prepare=lambda m, c=count: _kill_in_turn(c)).wait() == -9
        same += bench.finish(name, *settings)
    return same == 4 and landed >= 6, f"{same}/4 runs identical after {landed} kills in the middle of a turn"


def _kill_in_turn(count: int) -> None:
    """Arrange SIGKILL when an environment was asked for the `count`-th time and has not answered."""
    from gspo.environments.pool import EpisodePool

    faults.kill_after(EpisodePool, "play", count)


def hung_environments(seed: int) -> Row:
    """T2: 64 environments that hang at once cost less than two deadlines, and leave no process."""
    start = time.monotonic()
    with closing(make_pool("Faulty", how="hang", turn=0, every=1, timeout=DEADLINE)) as pool:
        engine = make_episodes(Talker(lambda *_: ScriptedAnswer(())), pool)
        begin = time.monotonic()
        groups = _play(engine, num_groups=32, n=2)
        seconds = time.monotonic() - begin
        counts = pool.counts
    failed = sum(r.failure is not None and r.reward is None for g in groups for r in g.rollouts)
    left = children_of(os.getpid())
    passed = failed == counts.timeouts == 64 and seconds < 2 * DEADLINE and not left
    detail = (
        f"{failed} of 64 without a reward after {seconds:.1f} s, deadline {DEADLINE:g} s; {len(left)} processes left"
    )
    return Row("T2", "64 environments that hang at once", passed, detail, time.monotonic() - start)


def many_turns(seed: int) -> Row:
    """T3: 10,000 turns leave no process, no descriptor and no episode behind."""
    start = time.monotonic()
    _play_many(200)  # what a process opens once
    before = len(os.listdir("/proc/self/fd"))
    num_turns, held = _play_many(10_000)
    left, after = children_of(os.getpid()), len(os.listdir("/proc/self/fd"))
    passed = not left and after <= before and held == 0
    detail = f"{num_turns} turns; left: {len(left)} processes, {after - before} descriptors, {held} episodes"
    return Row("T3", "10,000 turns", passed, detail, time.monotonic() - start)


def _play_many(least: int) -> tuple[int, int]:
    """Play at least so many turns; returns how many, and how many episodes workers hold a moment after the last."""
    num_turns = 0
    with closing(make_pool(num_turns=20)) as pool:
        engine = make_episodes(Talker(lambda *_: ScriptedAnswer(())), pool)
        while num_turns < least:
            groups = _play(engine, num_groups=16, n=4)
            num_turns += sum(len(r.turns) for g in groups for r in g.rollouts)
        end = time.monotonic() + 10.0
        while pool._homes and time.monotonic() < end:
            time.sleep(0.01)
        return num_turns, len(pool._homes)


class Talker(ScriptedEngine):
    """Writes the same two tokens in every turn."""

    def _recite(self, sequence: Any) -> None:
        sequence.finish(sequence.extended((5, ENDS[0]), (-1.0, -1.0), 0), "", "stop")


def _play(engine: Any, *, num_groups: int, n: int) -> list[Any]:
    for number in range(num_groups):
        prompt = Prompt(f"p{number}", ({"role": "user", "content": "?"},), (3, 4))
        engine.submit(GroupRequest(prompt, number, n, 0, SamplingParams(120), 0))
    groups = []
    while engine.num_in_flight:
        groups += engine.step()
    return groups


ROWS: dict[str, Check] = {
    "T1": with_bench(kills_in_turns, "T1", "SIGKILL in the middle of a turn, 2 per run, 4 runs"),
    "T2": hung_environments,
    "T3": many_turns,
}
