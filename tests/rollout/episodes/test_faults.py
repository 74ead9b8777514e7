"""Environments that fail, hang, die, flood or do not repeat themselves."""

from __future__ import annotations

import itertools
import os
import signal
from contextlib import closing
from typing import Any

import pytest

from gspo.environments.pool import EpisodePool
from gspo.rewards.turns import TurnScorer
from gspo.types import Group
from tests.distributed.ray.waiting import wait_until
from tests.rollout.episodes.world import ENDS, make_episodes, make_pool
from tests.rollout.models import drain, make_engine, make_model, make_request


def play(pool: EpisodePool, num_groups: int = 6, **settings: Any) -> list[Group]:
    engine = make_episodes(make_engine(make_model(), max_length=128, eos_token_ids=ENDS), pool, **settings)
    for number in range(num_groups):
        engine.submit(make_request(number, n=2, max_tokens=60))
    return sorted(drain(engine), key=lambda group: group.submission)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("raise", "the board is gone"),
        ("nan", "the reward of a step is nan"),
        ("die", "the worker died on it 2 times"),
        ("silent", "neither messages nor done"),
    ],
)
def test_an_environment_that_fails_leaves_its_rollout_without_a_reward(how: str, reason: str) -> None:
    with closing(make_pool("Faulty", how=how)) as pool:
        groups = play(pool)
    reached = [r for g in groups if g.submission % 2 for r in g.rollouts if len(r.turns) >= 2]
    assert reached
    for rollout in reached:
        assert rollout.finish_reason == "environment" and rollout.failure is not None and reason in rollout.failure
        assert "row 'p" in rollout.failure and "response" in rollout.failure
    others = [r for g in groups if g.submission % 2 == 0 for r in g.rollouts]
    assert all(r.failure is None and r.turns for r in others)
    scorer = TurnScorer(NoFunction(), adds_function=False)
    for group in groups:
        scorer.submit(group)
    scored = [r for g in scorer.collect() for r in g.rollouts]
    assert [r.reward is None for r in scored] == [r.failure is not None for g in groups for r in g.rollouts]


def test_a_pool_forgets_episodes_that_are_over() -> None:
    with closing(make_pool()) as pool:
        play(pool, num_groups=2)
        assert wait_until(lambda: not pool._homes)


class NoFunction:
    """A scorer that must not be asked."""

    def submit(self, group: Group) -> None:
        raise AssertionError("the environment gives the reward")

    def collect(self) -> list[Group]:
        return []

    def close(self) -> None: ...


@pytest.mark.slow
def test_hung_environments_are_stopped_side_by_side() -> None:
    with closing(make_pool("Faulty", how="hang", turn=0, every=1, timeout=3.0)) as pool:
        groups = play(pool, num_groups=32)
        counts = pool.counts
    rollouts = [r for g in groups for r in g.rollouts]
    assert len(rollouts) == 64 and all("no result within 3 s" in (r.failure or "") for r in rollouts)
    # Each of them was stopped at its deadline, and the pool grew so that none waited for another.
    assert counts.timeouts == 64 and counts.started >= 64


def test_a_flood_is_cut_and_counted() -> None:
    with closing(make_pool("Faulty", how="flood", turn=0)) as pool:
        groups = play(pool, max_observation=10)
    flooded = [r for g in groups if g.submission % 2 for r in g.rollouts if len(r.turns) > 1]
    assert flooded
    for rollout in flooded:
        assert rollout.turns[0].num_cut == 1 and len(rollout.token_ids) <= 60
        assert len(rollout.turns[0].observation) < 5000


@pytest.mark.parametrize("step", [1, 3, 6])
def test_the_death_of_a_worker_changes_nothing(step: int) -> None:
    """One worker: a job that meets a second death is a missing reward, as for every reward function."""
    with closing(make_pool()) as pool:
        expected = play(pool)
        engine = make_episodes(make_engine(make_model(), max_length=128, eos_token_ids=ENDS), pool)
        for number in range(6):
            engine.submit(make_request(number, n=2, max_tokens=60))
        groups = []
        for number in itertools.count(1):
            if not engine.num_in_flight:
                break
            groups += engine.step()
            if number == step:
                os.kill(next(iter(pool._workers)).pid, signal.SIGKILL)
    assert sorted(groups, key=lambda group: group.submission) == expected


@pytest.mark.parametrize("how", ["answer", "reward"])
def test_a_group_whose_environment_does_not_repeat_itself_is_generated_anew(how: str) -> None:
    with closing(make_pool("Unsteady", num_workers=1, how=how)) as pool:
        engine = make_episodes(make_engine(make_model(), max_length=128, eos_token_ids=ENDS), pool)
        engine.submit(make_request(0, n=2, max_tokens=90))
        while not any(len(r.turns) > 1 for request in engine.unfinished() for r in request.partial):
            assert engine.num_in_flight, "the episode ended too early for this test"
            engine.step()
        for worker in list(pool._workers):
            os.kill(worker.pid, signal.SIGKILL)
        (group,) = drain(engine)
        turns = [turn for r in group.rollouts for turn in r.turns]
        pids = {turn.observation if how == "answer" else turn.reward for turn in turns}
    assert engine.counts.diverged == 1
    assert len(pids) == 1, "the group was played in one process, from its beginning"


@pytest.mark.slow
def test_many_turns_leave_nothing_behind() -> None:
    with closing(make_pool(num_turns=20)) as pool:
        engine = make_episodes(make_engine(make_model(), max_length=128, eos_token_ids=ENDS), pool)
        before = len(os.listdir("/proc/self/fd"))
        for number in range(40):
            engine.submit(make_request(number, n=4, max_tokens=100))
        groups = drain(engine, limit=10_000)
        assert sum(len(r.turns) for g in groups for r in g.rollouts) > 300
        assert len(os.listdir("/proc/self/fd")) <= before + 2 * len(pool._workers) + 4
    assert not pool._workers and not pool._homes
