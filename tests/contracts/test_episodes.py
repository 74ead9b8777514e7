"""The RolloutEngine contract, run on Episodes: around a native engine, with and without lag, and inside a fleet."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from gspo.environments.pool import EpisodePool
from gspo.rollout.engine import GroupRequest, RolloutEngine
from gspo.rollout.workers.lockstep_fleet import LockstepFleet
from gspo.types import Rollout
from tests.contracts.rollout_engine import DeterministicEngineContract, NewEngine
from tests.rollout.episodes.world import ENDS, make_episodes, make_pool
from tests.rollout.models import make_engine, make_model
from tests.rollout.workers.thread_connection import NoWeights, ThreadConnection, no_weights

_MODEL = make_model()


@pytest.fixture(scope="module")
def pool() -> Iterator[EpisodePool]:
    pool = make_pool()
    yield pool
    pool.close()


def over_native(pool: EpisodePool, version: int = 0, num_slots: int = 5, **options: Any) -> RolloutEngine:
    model = copy.deepcopy(_MODEL)
    inner = make_engine(model, num_slots=num_slots, decode_chunk=2, max_length=128, eos_token_ids=ENDS, version=version)
    return make_episodes(inner, pool, **options)


class TurnsContract(DeterministicEngineContract):
    """The contract, for rollouts with turns."""

    def check_rollout(self, rollout: Rollout, request: GroupRequest) -> None:
        assert 1 <= len(rollout.token_ids) <= request.params.max_tokens
        assert len(rollout.log_probs) == len(rollout.versions) == len(rollout.loss_mask) == len(rollout.token_ids)
        assert rollout.turns and rollout.turns[0].start == 0 and rollout.turns[-1].end == len(rollout.token_ids)
        own = {i for turn in rollout.turns for i in range(turn.start, turn.end)}
        assert rollout.loss_mask == tuple(int(i in own) for i in range(len(rollout.token_ids)))
        assert all(p == 0.0 for p, m in zip(rollout.log_probs, rollout.loss_mask) if not m)
        assert rollout.finish_reason in ("length", "environment") and rollout.failure is None
        assert (len(rollout.turns) == 3) == (rollout.finish_reason == "environment")


class TestEpisodes(TurnsContract):
    @pytest.fixture
    def new_engine(self, pool: EpisodePool) -> NewEngine:
        return lambda version=0: over_native(pool, version)


class TestEpisodesThatAnswerLate(TurnsContract):
    @pytest.fixture
    def new_engine(self, pool: EpisodePool) -> NewEngine:
        return lambda version=0: over_native(pool, version, lag=3)


class TestEpisodesInAFleet(TurnsContract):
    @pytest.fixture
    def new_engine(self, pool: EpisodePool) -> Iterator[NewEngine]:
        with ExitStack() as stack:

            def new(version: int = 0) -> LockstepFleet:
                fleet = LockstepFleet(
                    lambda index: ThreadConnection(lambda: over_native(pool, num_slots=3), index),
                    2,
                    weights=no_weights,
                    store=NoWeights(),
                    version=version,
                )
                stack.callback(fleet.kill)
                return fleet

            yield new
