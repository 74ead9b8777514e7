"""The RolloutEngine contract on vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.rollout.vllm.engine import VllmEngine
from gspo.types import Group
from tests.contracts.rollout_engine import DeterministicEngineContract, NewEngine
from tests.vllm.conftest import TOLERANCE

pytestmark = pytest.mark.vllm


class TestVllmEngine(DeterministicEngineContract):
    @pytest.fixture
    def new_engine(self, running: VllmEngine, model: Any) -> NewEngine:
        def new(version: int = 0) -> VllmEngine:
            running.clear()
            running.load_weights(dict(model.named_parameters()), version)
            return running

        return new

    def same(self, groups: list[Group], others: list[Group]) -> bool:
        """The same tokens; log-probs may differ in their last bits with the batch they were computed in."""
        for group, other in zip(groups, others, strict=True):
            assert group.prompt == other.prompt and group.submission == other.submission
            for a, b in zip(group.rollouts, other.rollouts, strict=True):
                assert a.token_ids == b.token_ids and a.versions == b.versions
                assert a.finish_reason == b.finish_reason and a.text == b.text
                assert a.log_probs == pytest.approx(b.log_probs, abs=TOLERANCE)
        return True
