"""Rollouts of several conversations: how the rows of branches share the advantage of their rollout."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from gspo.types import AdvantageBatch, ScoredBatch

PER_SEQUENCE = ("seq-mean-token-mean",)  # aggregations that give every row the same weight, whatever its length


def with_branches(
    batch: ScoredBatch, rollouts: AdvantageBatch, aggregation: str | None, by_token: Tensor | None = None
) -> AdvantageBatch:
    """The batch with the advantages of its rollouts, [R,T], also on the rows of their branches.

    `by_token` [B,T] is what the tokens of every row have beside the advantage of their rollout.
    """
    advantages, returns = (_spread(values, batch, rollouts) for values in (rollouts.advantages, rollouts.returns))
    if by_token is not None:
        advantages = advantages + by_token
    return batch.with_advantages(advantages * weight_of_rows(batch, aggregation), returns)


def rollout_of_rows(batch: ScoredBatch) -> Tensor:
    """[B] the rollout to which each row belongs."""
    return torch.tensor([*range(batch.num_rollouts), *batch.branch_of])


def weight_of_rows(batch: ScoredBatch, aggregation: str | None) -> Tensor:
    """[B,1] by which a row's advantages are multiplied, so that a rollout's rows count as one sequence with all their tokens.

    Where an aggregation averages each row first, this is the row's share of the rollout's tokens: Σ_rows share · mean =
    mean. Elsewhere it is 1.
    """
    lengths, parents = batch.mask.bool().sum(-1).double(), rollout_of_rows(batch)
    if aggregation not in PER_SEQUENCE:
        return torch.ones_like(lengths)[:, None]
    totals = torch.zeros(batch.num_rollouts, dtype=torch.float64).index_add(0, parents, lengths)
    return (lengths / totals[parents].clamp(min=1))[:, None]


def rollouts_alone(batch: ScoredBatch) -> ScoredBatch:
    """The rollouts without their branches. Where only branches are trained on, a rollout's last token carries its advantage."""
    alone = batch.without_branches()
    empty = [row for row in sorted(set(batch.branch_of)) if not alone.mask[row].any()]
    if not empty:
        return alone
    mask = alone.mask.clone()
    mask[empty, [len(alone.response_ids[row]) - 1 for row in empty]] = 1
    return dataclasses.replace(alone, mask=mask)


def _spread(values: Tensor, batch: ScoredBatch, rollouts: AdvantageBatch) -> Tensor:
    """Values [B,T]: those of the rollouts, then of each branch its rollout's mean."""
    mask, is_trained = rollouts.mask.bool(), batch.mask[: batch.num_rollouts].bool().any(-1, keepdim=True)
    means = (values * mask).sum(-1) / mask.sum(-1).clamp(min=1)
    own = means[list(batch.branch_of)][:, None] * batch.mask[batch.num_rollouts :].bool()
    return torch.cat([torch.where(is_trained, values, 0.0), own.to(values.dtype)])
