"""The models of a run whose weights lie in other processes: what `Roles` does, asked of every rank of a RankGroup."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo.algo.diagnostics import entropy_metric
from gspo.checkpoint.folder import Loaded
from gspo.checkpoint.tensor_sets import TensorSet
from gspo.config import TrainerConfig
from gspo.distributed.rank_group import RankGroup
from gspo.distributed.rank_results import RankScores, RankUpdate
from gspo.training.parallel.ranks import merge_ranks
from gspo.training.policy import PolicyLoss, Regulariser, Update
from gspo.training.roles import PolicyFacts
from gspo.types import AdvantageBatch, Batch, Metrics, ScoredBatch, TrainBatch


def merge_rows(parts: list[Any]) -> Any:
    """One tensor of all rows from one a rank, which is 0 in the rows of others. None where there is none."""
    return None if parts[0] is None else torch.stack(parts).sum(0)


class RankPolicy:
    """The policy of a team."""

    def __init__(self, team: RankGroup) -> None:
        self._team = team

    def score(self, batch: TrainBatch) -> ScoredBatch:
        """The batch with π_old and entropies, as Policy.score gives them."""
        parts: list[RankScores] = self._team.call("score", batch)
        return batch.with_old(
            merge_rows([part.old_log_probs for part in parts]),
            merge_rows([part.entropy for part in parts]),
            unscored_rows=sorted(row for part in parts for row in part.unscored_rows),
        )

    def log_probs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [B,T] under the current weights."""
        parts = self._team.call("log_probs", batch)
        return merge_rows([part[0] for part in parts]), merge_rows([part[1] for part in parts])

    def update(
        self, batch: AdvantageBatch, loss: PolicyLoss, *, step: int, regulariser: Regulariser | None = None
    ) -> Update:
        """As Policy.update."""
        parts: list[RankUpdate] = self._team.call("update", batch, loss, step, regulariser)
        found = [part.found for part in parts if part.found is not None]
        if found:
            batch = batch.with_rows(
                [row for part in found for row in part.rows],
                torch.cat([part.log_probs for part in found]),
                torch.cat([part.entropy for part in found]),
            )
        metrics = merge_ranks([part.metrics for part in parts])
        if batch.entropy is not None:
            metrics |= entropy_metric(batch.entropy, batch.mask)
        return Update(metrics, merge_rows([part.log_probs for part in parts]), batch)


class RankCritic:
    """The critic of a team."""

    def __init__(self, team: RankGroup) -> None:
        self._team = team

    def score(self, batch: Batch) -> Batch:
        """The batch with `values`."""
        return dataclasses.replace(batch, values=merge_rows(self._team.call("values", batch)))

    def update(self, batch: AdvantageBatch, *, step: int) -> Metrics:
        """As Critic.update."""
        return merge_ranks(self._team.call("update_critic", batch, step))


class RankReference:
    """The frozen reference of a team."""

    def __init__(self, team: RankGroup) -> None:
        self._team = team

    def log_probs(self, batch: TrainBatch) -> Tensor:
        """Log-probs [B,T] of the batch's responses."""
        return merge_rows(self._team.call("reference", batch))

    def score(self, batch: Batch) -> Batch:
        """The batch with `ref_log_probs`."""
        return dataclasses.replace(batch, ref_log_probs=self.log_probs(batch))


class RankRoles:
    """The models of one run, sharded over the ranks of a team.

    With a `tokenizer` every rank also hosts a rollout engine over a full copy of the policy (see RankEngine).
    """

    adapters = None  # the ranks have them, and give weights with them merged in
    saves_aside = False  # every rank takes part in a save, and may be needed for generation

    def __init__(
        self,
        team: RankGroup,
        config: TrainerConfig,
        total_steps: int,
        weights_from: Path | None = None,
        tokenizer: Any = None,
    ) -> None:
        self.team = team
        folder = None if weights_from is None else str(weights_from.absolute())
        self._facts: PolicyFacts = team.call("build", config, total_steps, folder, tokenizer)[0]
        self.policy = RankPolicy(team)
        self.critic = RankCritic(team) if self._facts.has_critic else None
        self.reference = RankReference(team) if self._facts.has_reference else None

    def facts(self) -> PolicyFacts:
        return self._facts

    def update_policy(
        self, batch: AdvantageBatch, loss: PolicyLoss, *, step: int, regulariser: Regulariser | None = None
    ) -> Update:
        return self.policy.update(batch, loss, step=step, regulariser=regulariser)

    def with_reference(self, batch: Batch) -> Batch:
        assert self.reference is not None
        return self.reference.score(batch)

    def scale_lr(self, factor: float) -> None:
        self.team.call("scale_lr", factor)

    def weights(self) -> dict[str, Tensor]:
        """The policy's weights in one piece, in its compute precision and in host memory."""
        return self.team.call("weights")[0]

    def save_model(self, folder: Path) -> None:
        """The policy as an ordinary Hugging Face folder."""
        self.team.call("save_model", str(folder.absolute()))

    def tensors(self) -> dict[str, TensorSet]:
        """Nothing: the ranks write what they hold themselves."""
        return {}

    def write_shards(self, folder: Path) -> None:
        """Let every rank write its part of what a resume needs beside the policy's folder."""
        self.team.call("write_shards", str(folder.absolute()))

    def load(self, loaded: Loaded) -> None:
        """Take up the state of a checkpoint, whoever wrote it: every rank reads what its shards need."""
        self.team.call("load_shards", str((loaded.path / "training").absolute()))

    def stacks(self) -> str:
        """What the ranks are doing now."""
        return self.team.stacks()

    def close(self) -> None:
        self.team.close()
