"""One trainer rank: its shards of the models, its share of every batch, and its rollout engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gspo.checkpoint.contents import Shapes
from gspo.checkpoint.tensor_sets import TensorSet, fill_set, write_sets
from gspo.distributed.rank_group import RankPlace
from gspo.metrics import Metric, Metrics
from gspo.models.load import no_progress_bars
from gspo.rollout.engine import GroupRequest, RolloutEngine
from gspo.training.parallel.fsdp import Shards
from gspo.training.parallel.sharded_lora import ShardedAdapters
from gspo.training.policy import LossFunction, Regulariser, Supervision
from gspo.training.reward_model import Text
from gspo.training.roles import ADAPTER_FILES, LocalRoles, PolicyFacts
from gspo.types import AdvantageBatch, Group, TrainBatch

JOIN_TIMEOUT = timedelta(minutes=30)  # for joining and for every collective


@dataclass
class RankModels:
    """The models of one rank: its shards, and, where ranks generate, an engine over a full copy of the policy."""

    roles: LocalRoles
    engine: RolloutEngine | None = None
    engine_model: Any = None


MakeModels = Callable[[torch.device], RankModels]
"""Builds the models of a rank on its device. It is pickled: a function of a module, or a partial of one."""


@dataclass(frozen=True, slots=True)
class RankScores:
    """π_old and entropies [B,T], 0 in other ranks' rows. The update will score this rank's `unscored_rows`."""

    old_log_probs: Tensor
    entropy: Tensor | None
    unscored_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RankUpdate:
    """One rank's part of an update: its metrics, and its rows' log-probs [B,T], 0 in other ranks' rows.

    `scored_rows` are the rows that the update scored, with their π_old and entropies [len(scored_rows),T].
    """

    metrics: Metrics
    log_probs: Tensor
    scored_rows: list[int]
    old_log_probs: Tensor
    entropy: Tensor | None


class RankWorker:
    """The methods that a RankGroup calls. Each runs on all ranks at once with the same arguments.

    The host, a torchrun process or a Ray actor, creates one, calls `join` once, and `run` for every call.
    """

    def __init__(self) -> None:
        self.place: RankPlace | None = None
        self._models: RankModels | None = None
        self._adapters: ShardedAdapters | None = None

    def join(self, place: RankPlace) -> None:
        """Set up torch.distributed with the other ranks: gloo for CPU tensors, nccl for GPU tensors."""
        device = torch.device(place.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=f"tcp://{place.address}:{place.port}",
            rank=place.rank,
            world_size=place.world_size,
            timeout=JOIN_TIMEOUT,
        )
        self.place, self._device = place, device

    def run(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method by its name."""
        return getattr(self, method)(*args)

    def leave(self) -> None:
        """Free the models and leave torch.distributed."""
        self.unload()
        if dist.is_initialized():
            dist.destroy_process_group()

    def build(self, make: MakeModels) -> PolicyFacts:
        """Load and shard the models. Frees the previous ones first."""
        self.unload()
        self._models = make(self._device)
        roles, shards = self.roles, self._shards(self.roles.policy)
        self._adapters = None if roles.adapters is None else ShardedAdapters(roles.adapters, shards)
        return dataclasses.replace(
            roles.facts(),
            device=_device_name(self._device),
            shapes=shards.shapes(),
            num_ranks=shards.size,
            ranks_per_sequence=shards.ranks_per_sequence,
        )

    def unload(self) -> None:
        """Free the models and the engine."""
        if self._models is not None and self._models.engine is not None:
            self._models.engine.close()
        self._models = self._adapters = None

    def score(self, batch: TrainBatch) -> RankScores:
        """π_old and entropies of this rank's rows."""
        with self.roles.policy.ranks.resident():
            scored = self.roles.policy.score(batch)
        return RankScores(scored.old_log_probs, scored.entropy, scored.unscored_rows)

    def log_probs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies of this rank's rows, 0 in others."""
        with self.roles.policy.ranks.resident():
            return self.roles.policy.log_probs(batch)

    def reference(self, batch: TrainBatch) -> Tensor:
        """Log-probs of this rank's rows under the reference, 0 in others."""
        reference = self.roles.reference
        assert reference is not None
        with reference.scorer.ranks.resident():
            return reference.log_probs(batch)

    def reward_scores(self, texts: list[Text]) -> Tensor:
        """The reward model's scores of this rank's texts, 0 for others."""
        model = self.roles.reward_model
        assert model is not None
        with model.ranks.resident():
            return model.scores(texts)

    def values(self, batch: TrainBatch) -> Tensor:
        """The critic's values of this rank's rows, 0 in others."""
        critic = self.roles.critic
        assert critic is not None
        with critic.ranks.resident():
            values = critic.score(batch).values
        assert values is not None
        return values

    def update(
        self,
        batch: AdvantageBatch,
        loss: LossFunction,
        step: int,
        regulariser: Regulariser | None,
        beside: Supervision | None = None,
    ) -> RankUpdate:
        """Train the policy on a batch, each rank on its rows of every mini-batch."""
        policy = self.roles.policy
        with policy.ranks.resident(policy.optimizer):
            update = self.roles.update_policy(batch, loss, step=step, regulariser=regulariser, beside=beside)
        metrics = _plain(update.metrics)
        if batch.entropy is not None:
            metrics.pop("actor/entropy", None)  # the controller computes it from the rows of all ranks
        after = update.batch
        rows = sorted(set(batch.unscored_rows) - set(after.unscored_rows))
        entropy = None if after.entropy is None else after.entropy[rows]
        return RankUpdate(metrics, update.log_probs, rows, after.old_log_probs[rows], entropy)

    def update_critic(self, batch: AdvantageBatch, step: int) -> Metrics:
        """Train the critic on a batch, each rank on its rows of every mini-batch."""
        critic = self.roles.critic
        assert critic is not None
        with critic.ranks.resident(critic.optimizer):
            return _plain(critic.update(batch, step=step))

    def scale_lr(self, factor: float) -> None:
        self.roles.scale_lr(factor)

    def engine_advance(self, requests: Sequence[GroupRequest]) -> list[Group]:
        """Queue this rank's share of the requests and advance generation. Returns the groups that finished."""
        for request in requests:
            if self._is_mine(request.submission):
                self.engine.submit(request)
        return self.engine.step()

    def engine_generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        """Run this rank's share of the requests to the end: those whose index modulo world_size is the rank."""
        return self.engine.generate([r for i, r in enumerate(requests) if self._is_mine(i)])

    def engine_unfinished(self) -> list[GroupRequest]:
        return self.engine.unfinished()

    def engine_clear(self) -> None:
        self.engine.clear()

    def engine_publish(self, version: int) -> None:
        """Copy the policy's current weights, gathered from all shards, to the engine."""
        assert self._models is not None
        own = self._models.engine_model.state_dict()
        policy = self.roles.policy
        with torch.no_grad(), policy.ranks.resident():
            for name, tensor in self._full_tensors():
                own[name].copy_(tensor)
        self.engine.load_weights(None, version)

    def weights(self) -> dict[str, Tensor]:
        """On rank 0 the policy's full weights, adapters merged in, in compute precision and host memory; {} on others."""
        shards = self._shards(self.roles.policy)
        dtype, out = shards.settings.compute_dtype, {}
        with torch.no_grad(), shards.resident():
            for name, tensor in self._full_tensors():
                if shards.rank == 0:
                    out[name] = tensor.to("cpu", dtype if tensor.is_floating_point() else None)
        return out

    def save_model(self, folder: str) -> None:
        """Write the policy from rank 0 as a Hugging Face folder, with its adapters in `training/`."""
        weights = self.weights()
        if dist.get_rank() == 0:
            model = self.roles.policy.model
            with torch.device("meta"):
                plain = type(model)(model.config)
            plain.load_state_dict(weights, assign=True)
            plain.tie_weights()
            plain.generation_config = model.generation_config
            # The export reverses how loading converted the files' names and shapes.
            plain._weight_conversions = getattr(model, "_weight_conversions", None)
            with no_progress_bars():
                plain.save_pretrained(folder)
        if self._adapters is not None:
            with self.roles.policy.ranks.resident():
                self._adapters.save((Path(folder) / "training" / ADAPTER_FILES).parent)

    def _full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of the model without adapters, gathered one by one."""
        if self._adapters is not None:
            return self._adapters.merged_tensors()
        return self._shards(self.roles.policy).full_tensors()

    def write_shards(self, folder: str) -> None:
        """Write this rank's shards of optimizer state and masters, which a resume needs beside the model."""
        write_sets(self._sets(), Path(folder))

    def without_state(self) -> dict[str, list[str]]:
        return self.roles.without_state()

    def prepare_sets(self) -> dict[str, Shapes]:
        """Create the optimiser state of every parameter. Returns the full shapes of all tensor sets."""
        for role in (self.roles.policy, self.roles.critic):
            if role is not None:
                role.optimizer.prepare_state()
        return {name: {key: tuple(t.shape) for key, t in members.items()} for name, members in self._sets().items()}

    def load_shards(self, folder: str, left_out: Mapping[str, Collection[str]]) -> None:
        """Read this rank's shards of a checkpoint that any number of ranks wrote, after `prepare_sets`.

        Adapters come first: an unsharded run writes them rounded to its compute precision, and the masters correct
        that. Tensors `left_out` of a set keep their values.
        """
        for name, members in sorted(self._sets().items(), key=lambda item: item[0] != ADAPTER_FILES):
            fill_set(members, name, Path(folder), left_out.get(name, ()))

    def _sets(self) -> dict[str, TensorSet]:
        """The tensor sets of a checkpoint under the names of an unsharded run.

        The exported model is in compute precision. Where that is lower than float32, the shards, which are the masters,
        are saved with the moments.
        """
        sets = self.roles.tensors()
        roles = {"optimizer": self.roles.policy, "critic/optimizer": self.roles.critic}
        for name, role in roles.items():
            if role is None:
                continue
            role.ranks.rest()
            if self._shards(role).settings.compute_dtype != torch.float32:
                sets[name] |= {f"master/{key}": p.detach() for key, p in role.optimizer.parameters.items()}
        return sets

    @property
    def roles(self) -> LocalRoles:
        assert self._models is not None, "build() comes first"
        return self._models.roles

    @property
    def engine(self) -> RolloutEngine:
        assert self._models is not None and self._models.engine is not None, "the ranks have no engine"
        return self._models.engine

    def _is_mine(self, number: int) -> bool:
        """Whether this rank has work item `number`. A resumed run assigns the same items to the same ranks."""
        return number % dist.get_world_size() == dist.get_rank()

    @staticmethod
    def _shards(role: Any) -> Shards:
        assert isinstance(role.ranks, Shards)
        return role.ranks


def _plain(metrics: Metrics) -> Metrics:
    """The metrics as Python numbers, for sending to another process."""
    return {name: Metric(m.kind, float(m.value), float(m.weight)) for name, m in metrics.items()}


def _device_name(device: torch.device) -> str:
    return device.type if device.type == "cpu" else f"{device.type} ({torch.cuda.get_device_name(device)})"
