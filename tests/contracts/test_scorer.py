"""The Scorer contract, run on each implementation and on those that stand in for one in tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gspo.algo.kl import FixedController
from gspo.rewards import builtin, make_scorer
from gspo.rewards.protocol import Scorer
from gspo.rewards.scoring import PoolScorer
from gspo.training.kl_reward import KlScorer
from gspo.types import Group, Prompt, Reward
from tests.contracts.scorer import ScorerContract
from tests.faults.faulty_rewards import compute_score
from tests.faults.reward_rows import processes_of_session, server_pid
from tests.sampling.world import ScriptedScorer, SlowScorer


def length(prompt: Prompt, response: str) -> float:
    return compute_score(prompt.data_source, response, prompt.ground_truth)


def rule(group: Group, index: int) -> Reward | None:
    text = group.rollouts[index].text
    return None if text.startswith("raise") else Reward(float(len(text)))


def closing(scorer: Scorer) -> Iterator[Scorer]:
    yield scorer
    scorer.close()


class TestInProcess(ScorerContract):
    """A cheap built-in: graded before `submit` returns."""

    @pytest.fixture
    def scorer(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scorer]:
        monkeypatch.setattr(builtin.REWARDS, "_items", dict(builtin.REWARDS._items))
        builtin.reward("contract", cheap=True)(length)
        scorer = make_scorer()
        yield from closing(scorer)
        assert isinstance(scorer, PoolScorer) and server_pid(scorer) == 0


class TestForkedWorkers(ScorerContract):
    @pytest.fixture
    def scorer(self) -> Iterator[Scorer]:
        scorer = make_scorer("tests.faults.faulty_rewards:compute_score", num_workers=2, timeout=60.0)
        assert isinstance(scorer, PoolScorer)
        server = server_pid(scorer)
        yield from closing(scorer)
        assert server and processes_of_session(server) == []


class TestThreads(ScorerContract):
    @pytest.fixture
    def scorer(self) -> Iterator[Scorer]:
        yield from closing(make_scorer(length, timeout=60.0))


class TestKlScorer(ScorerContract):
    """The KL penalty around another scorer, with a policy that equals its reference."""

    @pytest.fixture
    def scorer(self) -> Iterator[Scorer]:
        class Policy:
            def log_probs(self, batch: Any) -> Any:
                return torch.full_like(batch.mask, -1.0, dtype=torch.float32), None

        class Reference:
            def log_probs(self, batch: Any) -> Any:
                return Policy().log_probs(batch)[0]

        inner: Any = make_scorer(length, timeout=60.0)
        roles: Any = Policy(), Reference()
        yield from closing(KlScorer(inner, *roles, FixedController(0.1), "k1"))


class TestScriptedScorer(ScorerContract):
    @pytest.fixture
    def scorer(self) -> Scorer:
        return ScriptedScorer(rule)


class TestSlowScorer(ScorerContract):
    @pytest.fixture
    def scorer(self) -> Iterator[Scorer]:
        yield from closing(SlowScorer(rule, lambda group: 0.1 / (1 + group.submission)))
