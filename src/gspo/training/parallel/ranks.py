"""The ranks that train one model together, and how a mini-batch is divided among them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor

from gspo.metrics import Metrics, merge_metrics
from gspo.training.parallel.sequence import SequenceRanks
from gspo.types import BatchTotals, TrainBatch

T = TypeVar("T")

# Metrics, by the last part of their names, that are equal on every rank: one rank's value counts.
SAME_EVERYWHERE = {"skipped_updates", "nonfinite_loss", "nonfinite_gradient", "grad_norm", "lr", "vf_explained_var"}


class Ranks:
    """One process with the whole model. `Shards` overrides this for several ranks."""

    rank = 0
    size = 1
    sequence: SequenceRanks | None = None  # the ranks that run the same rows as this one

    @property
    def ranks_per_sequence(self) -> int:
        return 1 if self.sequence is None else self.sequence.size

    @property
    def num_shares(self) -> int:
        """In how many shares the rows of a mini-batch are divided. Ranks of one sequence have the same share."""
        return self.size // self.ranks_per_sequence

    @property
    def share(self) -> int:
        """The number of this rank's share."""
        return self.rank // self.ranks_per_sequence

    def run(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Call a function of the model. Only such a function may use weights outside the modules that own them."""
        return function(*args, **kwargs)

    def rest(self) -> None:
        """Free the weights that `run` gathered, after forwards without a backward."""

    @contextmanager
    def resident(self, optimizer: Any = None) -> Iterator[None]:
        """A context in which the weights, and an optimizer's state, are on the compute device."""
        yield

    def sum(self, values: Tensor) -> Tensor:
        """The sum over all shares, element by element, with the same bits on each rank."""
        return values

    def add_up(self, values: Tensor) -> Tensor:
        """Values of all tokens from those of each rank's part of a sequence, which are 0 elsewhere; differentiable."""
        return values if self.sequence is None else self.sequence.add_up(values)

    def total(self, own: BatchTotals) -> BatchTotals:
        """The counts of a mini-batch from those of each share."""
        if self.num_shares == 1:
            return own
        both = self.sum(torch.tensor([own.num_tokens, own.num_sequences], dtype=torch.float64))
        return BatchTotals(float(both[0]), float(both[1]))


ALONE = Ranks()


def split_over_ranks(batch: TrainBatch, rows: Sequence[int], num_ranks: int, *, share_prompts: bool) -> list[list[int]]:
    """The rows of each rank, with about equal numbers of tokens. Every rank computes the same shares.

    Rows that share a prompt stay together unless splitting them is more even, counting prompts that run twice.
    """
    if num_ranks == 1:
        return [list(rows)]
    by_row = _spread(batch, [[row] for row in rows], num_ranks, share_prompts=False)
    if not share_prompts:
        return by_row
    by_prompt = _spread(batch, batch.by_prompt(rows), num_ranks, share_prompts)
    return min((by_prompt, by_row), key=lambda parts: max(_cost(batch, part, share_prompts) for part in parts))


def _spread(batch: TrainBatch, units: list[list[int]], num_ranks: int, share_prompts: bool) -> list[list[int]]:
    bins = spread([_cost(batch, unit, share_prompts) for unit in units], num_ranks)
    return [[row for unit in of_rank for row in units[unit]] for of_rank in bins]


def spread(costs: Sequence[int], num_bins: int) -> list[list[int]]:
    """Items in bins: the most expensive first, each into the bin with the least cost. Bins keep the order of items."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    sums = [0] * num_bins
    for item in sorted(range(len(costs)), key=lambda item: -costs[item]):
        least = sums.index(min(sums))
        bins[least].append(item)
        sums[least] += costs[item]
    return [sorted(items) for items in bins]


def _cost(batch: TrainBatch, rows: Sequence[int], share_prompts: bool) -> int:
    """Number of tokens in a forward of these rows."""
    answers = sum(len(batch.response_ids[row]) for row in rows)
    if not share_prompts:
        return answers + sum(len(batch.prompt_ids[row]) for row in rows)
    return answers + sum(len(batch.prompt_ids[members[0]]) for members in batch.by_prompt(rows))


def idle_row(batch: TrainBatch) -> int:
    """The shortest row: a rank without rows runs it, with a loss of 0, while others run a micro-batch."""
    return min(range(batch.num_sequences), key=lambda row: len(batch.prompt_ids[row]) + len(batch.response_ids[row]))


def merge_ranks(metrics: Sequence[Metrics]) -> Metrics:
    """The metrics of one update from those of every rank. Metrics that are equal on all ranks count once."""
    merged = dict(metrics[0])
    for of_rank in metrics[1:]:
        own = {name: m for name, m in of_rank.items() if name.rpartition("/")[2] not in SAME_EVERYWHERE}
        merge_metrics(merged, own)
    return merged
