"""The models of a run as shards in the ranks of a group: every call goes to all of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.algo.diagnostics import entropy_metric
from gspo.checkpoint.contents import Shapes, check_sets
from gspo.checkpoint.folder import Loaded
from gspo.checkpoint.tensor_sets import TensorSet, stored_set
from gspo.distributed.rank_group import RankGroup
from gspo.distributed.rank_worker import MakeModels, RankScores, RankUpdate, RankWorker
from gspo.metrics import Metrics
from gspo.training.parallel.ranks import merge_ranks
from gspo.training.policy import LossFunction, Regulariser, Supervision, Upcoming, Update
from gspo.training.reward_model import Text
from gspo.training.roles import PolicyFacts
from gspo.types import AdvantageBatch, Batch, ScoredBatch, TrainBatch


def merge_rows(parts: list[Any]) -> Any:
    """The sum of one tensor per rank, each 0 in the rows of other ranks; None when the ranks have none."""
    return None if parts[0] is None else torch.stack(parts).sum(0)


@dataclass(frozen=True, slots=True)
class Shares:
    """A rank group, and one result per share of the rows: ranks that share their sequences have the same results."""

    ranks: RankGroup
    ranks_per_sequence: int

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        return self.ranks.call(method, *args)[:: self.ranks_per_sequence]


@dataclass(frozen=True, slots=True)
class RankPolicy:
    """The policy of a rank group."""

    ranks: Shares

    def score(self, batch: TrainBatch) -> ScoredBatch:
        """The batch with π_old and entropies, as Policy.score."""
        parts: list[RankScores] = self.ranks.call(RankWorker.score, batch)
        return batch.with_old(
            merge_rows([part.old_log_probs for part in parts]),
            merge_rows([part.entropy for part in parts]),
            unscored_rows=sorted(row for part in parts for row in part.unscored_rows),
        )

    def log_probs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [B,T] under the current weights."""
        parts = self.ranks.call(RankWorker.log_probs, batch)
        return merge_rows([part[0] for part in parts]), merge_rows([part[1] for part in parts])


@dataclass(frozen=True, slots=True)
class RankCritic:
    """The critic of a rank group."""

    ranks: Shares

    def score(self, batch: Batch) -> Batch:
        """The batch with `values`."""
        return dataclasses.replace(batch, values=merge_rows(self.ranks.call(RankWorker.values, batch)))

    def update(self, batch: AdvantageBatch, *, step: int) -> Metrics:
        """As Critic.update."""
        return merge_ranks(self.ranks.call(RankWorker.update_critic, batch, step))


@dataclass(frozen=True, slots=True)
class RankReference:
    """The frozen reference of a rank group."""

    ranks: Shares

    def log_probs(self, batch: TrainBatch) -> Tensor:
        """Log-probs [B,T] of the batch's responses."""
        return merge_rows(self.ranks.call(RankWorker.reference, batch))

    def score(self, batch: Batch) -> Batch:
        """The batch with `ref_log_probs`."""
        return dataclasses.replace(batch, ref_log_probs=self.log_probs(batch))


@dataclass(frozen=True, slots=True)
class RankRewardModel:
    """The frozen reward model of a rank group."""

    ranks: Shares

    def scores(self, texts: list[Text]) -> Tensor:
        """The scores [n] of texts."""
        return merge_rows(self.ranks.call(RankWorker.reward_scores, texts))


class RankRoles:
    """The models of one run, sharded over the ranks of a group. Each rank builds its shards with `make`."""

    saves_in_background = False  # a save is a call to all ranks, and so is generation

    def __init__(self, ranks: RankGroup, make: MakeModels) -> None:
        self._ranks = ranks
        self._facts: PolicyFacts = ranks.call(RankWorker.build, make)[0]
        self._shares = Shares(ranks, self._facts.ranks_per_sequence)
        self.policy = RankPolicy(self._shares)
        self.critic = RankCritic(self._shares) if self._facts.has_critic else None
        self.reference = RankReference(self._shares) if self._facts.has_reference else None
        self.reward_model = RankRewardModel(self._shares) if self._facts.has_reward_model else None

    def facts(self) -> PolicyFacts:
        return self._facts

    def update_policy(
        self,
        batch: AdvantageBatch,
        loss: LossFunction,
        *,
        step: int,
        regulariser: Regulariser | None = None,
        upcoming: Upcoming | None = None,  # the ranks have no batch but the one that is sent
        beside: Supervision | None = None,
    ) -> Update:
        parts: list[RankUpdate] = self._shares.call(RankWorker.update, batch, loss, step, regulariser, beside)
        if rows := [row for part in parts for row in part.scored_rows]:
            old = torch.cat([part.old_log_probs for part in parts])
            entropy = torch.cat([part.entropy for part in parts if part.entropy is not None])
            batch = batch.with_rows(rows, old, entropy)
        metrics = merge_ranks([part.metrics for part in parts])
        if batch.entropy is not None:
            metrics |= entropy_metric(batch.entropy, batch.mask)
        return Update(metrics, merge_rows([part.log_probs for part in parts]), batch)

    def scale_lr(self, factor: float) -> None:
        self._ranks.call(RankWorker.scale_lr, factor)

    @contextmanager
    def published_weights(self) -> Iterator[Mapping[str, Tensor]]:
        yield self.weights()

    def weights(self) -> dict[str, Tensor]:
        """The policy's full weights, in its compute precision and in host memory."""
        return self._ranks.call(RankWorker.weights)[0]

    def save_model(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        assert weights is None, "the ranks write their own weights"
        self._ranks.call(RankWorker.save_model, str(folder.absolute()))

    def tensors(self) -> dict[str, TensorSet]:
        """Nothing: the ranks write their shards themselves."""
        return {}

    def write_shards(self, folder: Path) -> None:
        """Have every rank write its shards of optimizer state and masters."""
        self._ranks.call(RankWorker.write_shards, str(folder.absolute()))

    def without_state(self) -> dict[str, list[str]]:
        return self._ranks.call(RankWorker.without_state)[0]

    def load(self, loaded: Loaded, *, reset: bool = False) -> list[str]:
        """Restore a checkpoint that any number of ranks wrote. Every rank reads only its shards."""
        folder = (loaded.path / "training").absolute()
        expected: dict[str, Shapes] = self._ranks.call(RankWorker.prepare_sets)[0]
        stored = {name: stored_set(name, folder) for name in {*expected, *loaded.set_names}}
        unusable, notes = check_sets(loaded.path, loaded.state, expected, stored, reset=reset)
        self._ranks.call(RankWorker.load_shards, str(folder), unusable)
        return notes

    def stacks(self) -> str:
        return self._ranks.stacks()

    def close(self) -> None:
        self._ranks.close()
