"""Statistics over groups of sequence scores, for all groups at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Per-sequence view ([B], float64, on the CPU) of the group each sequence belongs to.

    `flat` marks groups whose scores are all equal, found by max == min: a mean of equal non-dyadic numbers need not
    equal them, so a difference from the mean would not be exactly 0.
    """

    scores: Tensor
    index: Tensor  # int64, dense group number
    size: Tensor
    mean: Tensor
    std: Tensor  # unbiased; 0 for a flat group or a group of one
    flat: Tensor  # bool
    single: Tensor  # bool

    def sum_over_group(self, values: Tensor) -> Tensor:
        """Each sequence's group total of `values` [B]."""
        num_groups = int(self.index.max()) + 1 if self.index.numel() else 0
        return torch.zeros(num_groups, dtype=values.dtype).index_add_(0, self.index, values)[self.index]


def group_stats(scores_B: Tensor, group_ids_B: Tensor) -> GroupStats:
    """Sizes, means and deviations of every group.

    Done on the CPU in float64: the tensors are tiny, and scatter-adds on a GPU round in no fixed order, which would
    make a resumed run differ in the last bit.
    """
    scores = scores_B.detach().to("cpu", torch.float64)
    unique, index = torch.unique(group_ids_B.to("cpu"), return_inverse=True)
    num_groups = unique.numel()

    def total(values: Tensor) -> Tensor:
        return torch.zeros(num_groups, dtype=torch.float64).index_add_(0, index, values)[index]

    def extreme(kind: str) -> Tensor:
        empty = torch.zeros(num_groups, dtype=torch.float64)
        return empty.scatter_reduce_(0, index, scores, kind, include_self=False)[index]

    size = total(torch.ones_like(scores))
    flat = extreme("amax") == extreme("amin")
    mean = torch.where(flat, scores, total(scores) / size)
    variance = total((scores - mean).square()) / (size - 1).clamp(min=1)
    return GroupStats(scores, index, size, mean, variance.sqrt(), flat, size == 1)


def best_and_second(stats: GroupStats) -> tuple[Tensor, Tensor]:
    """Row of each group's best score (the first of equals) and, aligned with it, the lead over the second best.

    The lead of a group of one is its score: there is no second answer to subtract.
    """
    by_score = torch.argsort(stats.scores, descending=True, stable=True)
    order = by_score[torch.argsort(stats.index[by_score], stable=True)]
    sizes = torch.bincount(stats.index)
    starts = torch.cumsum(sizes, 0) - sizes
    best = order[starts]
    second = order[(starts + 1).clamp(max=max(order.numel() - 1, 0))]
    runner_up = torch.where(sizes > 1, stats.scores[second], 0.0)
    return best, stats.scores[best] - runner_up
