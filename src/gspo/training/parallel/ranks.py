"""The processes that train one model together, and how a mini-batch is divided among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from gspo.metrics import Metrics, merge_metrics
from gspo.types import BatchTotals, TrainBatch

T = TypeVar("T")

# Last parts of the names of metrics that are the same on every rank, so that only one rank's count.
SAME_EVERYWHERE = {"skipped_updates", "nonfinite_loss", "nonfinite_gradient", "grad_norm", "lr", "vf_explained_var"}


class Ranks:
    """One process that holds the whole model: the case without sharding, and what sharding replaces."""

    rank = 0
    size = 1

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function of the model. Only within it may weights be used outside the modules that own them."""
        return function(*args, **kwargs)

    def rest(self) -> None:
        """Free what `run` gathered: called after forwards that no backward follows."""

    @contextmanager
    def resident(self, optimizer: Any = None) -> Iterator[None]:
        """Within this the weights, and an optimiser's state, are where they are computed with."""
        yield

    def sum(self, values: Tensor) -> Tensor:
        """Element by element over all ranks, with the same bits on each."""
        return values

    def total(self, own: BatchTotals) -> BatchTotals:
        """The denominators of a mini-batch from those of this rank's rows: counts, so the sum is exact."""
        if self.size == 1:
            return own
        both = self.sum(torch.tensor([own.num_tokens, own.num_sequences], dtype=torch.float64))
        return BatchTotals(float(both[0]), float(both[1]))


ALONE = Ranks()


def split_over_ranks(batch: TrainBatch, rows: Sequence[int], num_ranks: int, *, share_prompts: bool) -> list[list[int]]:
    """The rows of each rank, of even numbers of tokens. A function of the batch alone, so every rank knows all shares.

    Where prompts are shared, groups stay whole unless single rows come out more even, prompts computed twice included.
    """
    if num_ranks == 1:
        return [list(rows)]
    by_row = _spread(batch, [[row] for row in rows], num_ranks, share_prompts)
    if not share_prompts:
        return by_row
    groups: dict[int, list[int]] = {}
    for row in rows:
        groups.setdefault(int(batch.group_ids[row]), []).append(row)
    by_group = _spread(batch, list(groups.values()), num_ranks, share_prompts)
    return min((by_group, by_row), key=lambda parts: max(_cost(batch, part, share_prompts) for part in parts))


def _spread(batch: TrainBatch, units: list[list[int]], num_ranks: int, share_prompts: bool) -> list[list[int]]:
    """Units to ranks, the dearest first, each to the rank that has least; rows keep their order within a rank."""
    costs = [_cost(batch, unit, share_prompts) for unit in units]
    chosen: list[list[int]] = [[] for _ in range(num_ranks)]
    sums = [0] * num_ranks
    for unit in sorted(range(len(units)), key=lambda i: -costs[i]):
        least = sums.index(min(sums))
        chosen[least].append(unit)
        sums[least] += costs[unit]
    return [[row for unit in sorted(of_rank) for row in units[unit]] for of_rank in chosen]


def _cost(batch: TrainBatch, rows: Sequence[int], share_prompts: bool) -> int:
    """Tokens of a forward over these rows."""
    answers = sum(len(batch.response_ids[row]) for row in rows)
    if not share_prompts:
        return answers + sum(len(batch.prompt_ids[row]) for row in rows)
    return answers + sum({int(batch.group_ids[row]): len(batch.prompt_ids[row]) for row in rows}.values())


def idle_row(batch: TrainBatch) -> int:
    """The row a rank runs, for nothing, while others have one micro-batch more: the shortest."""
    return min(range(batch.num_sequences), key=lambda row: len(batch.prompt_ids[row]) + len(batch.response_ids[row]))


def merge_ranks(metrics: Sequence[Metrics]) -> Metrics:
    """The metrics of one update from those of every rank: rows add up, what all ranks know alike counts once."""
    merged = dict(metrics[0])
    for of_rank in metrics[1:]:
        own = {name: m for name, m in of_rank.items() if name.rpartition("/")[2] not in SAME_EVERYWHERE}
        merge_metrics(merged, own)
    return merged
