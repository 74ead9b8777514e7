"""Rollouts of several conversations: how the rows of branches share the advantage of their rollout."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.types import AdvantageBatch, ScoredBatch

PER_SEQUENCE = ("seq-mean-token-mean",)  # aggregations that give every row the same weight, whatever its length


def with_branches(
    batch: ScoredBatch, rollouts: AdvantageBatch, aggregation: str | None, by_token: Tensor | None = None
) -> AdvantageBatch:
    """The batch with the advantages of its rollouts, [R,T], also on the rows of their branches.

    `by_token` [B,T] is what the tokens of every row have beside the advantage of their rollout.
    The rows of a rollout count together as one sequence with all their tokens: where an aggregation averages each row
    first, a row's advantage is scaled by its share of the rollout's tokens, so that Σ_rows share · mean = mean.
    """
    parents = torch.tensor([*range(batch.num_rollouts), *batch.branch_of])
    lengths = batch.mask.bool().sum(-1).double()
    advantages, returns = (_spread(values, batch, rollouts) for values in (rollouts.advantages, rollouts.returns))
    if by_token is not None:
        advantages = advantages + by_token
    if aggregation in PER_SEQUENCE:
        totals = torch.zeros(batch.num_rollouts, dtype=torch.float64).index_add(0, parents, lengths)
        advantages = advantages * (lengths / totals[parents].clamp(min=1))[:, None]
    return batch.with_advantages(advantages, returns)


def _spread(values: Tensor, batch: ScoredBatch, rollouts: AdvantageBatch) -> Tensor:
    """Values [B,T]: those of the rollouts, then of each branch its rollout's mean."""
    mask = rollouts.mask.bool()
    means = (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    own = means[list(batch.branch_of)][:, None] * batch.mask[batch.num_rollouts :].bool()
    return torch.cat([values, own.to(values.dtype)])
