"""A rollout in several conversations counts as one sequence with all their tokens, whatever the aggregation."""

from __future__ import annotations

import pytest
import torch

from gspo.algo.aggregation import aggregate, count_totals
from gspo.algo.branches import with_branches
from gspo.algo.settings import AGGREGATIONS
from gspo.training.batch.batching import collate, count_rows
from gspo.types import Group, Prompt, Reward, Rollout

PROMPT = Prompt("p", (), (1, 2))


def rollout(size: int, *branches: int, score: float = 0.0) -> Rollout:
    parts = tuple(rollout(branch) for branch in branches)
    ids = (5,) * size
    log_probs = (-1.0,) * size
    return Rollout(ids, log_probs, (1,) * size, (0,) * size, "stop", reward=Reward(score), branches=parts)


@pytest.mark.parametrize("mode", AGGREGATIONS)
def test_a_rollout_in_three_parts_weighs_as_much_as_in_one(mode: str) -> None:
    """Σ_rows of the aggregated advantages is that of a batch in which each rollout is one row."""
    split = collate([Group(PROMPT, (rollout(4, 2, 3), rollout(5)), 0, 0)])
    whole = collate([Group(PROMPT, (rollout(9), rollout(5)), 0, 0)])
    assert split.branch_of == (0, 0) and whole.branch_of == ()
    per_rollout = torch.tensor([[3.0], [-1.0]])
    scored = split.with_old(split.rollout_log_probs)
    alone = scored.without_branches()
    given = alone.with_advantages(per_rollout * alone.mask, per_rollout * alone.mask)
    spread = with_branches(scored, given, mode).advantages
    ours = aggregate(spread, split.mask, count_rows(split, list(range(4))), mode, norm_length=10.0)
    want = aggregate(per_rollout * whole.mask, whole.mask, count_totals(whole.mask), mode, norm_length=10.0)
    assert ours.item() == pytest.approx(want.item(), rel=1e-6)
