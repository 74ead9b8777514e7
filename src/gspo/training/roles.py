"""The models of a run: the policy, and optionally a critic, a reference and adapters.

The loop uses `Roles`. `LocalRoles` holds the models in this process; `distributed.rank_roles.RankRoles` calls the ranks
of a group, which hold them in shards.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import Tensor

from gspo.checkpoint.contents import CheckpointError, Shapes, check_sets
from gspo.checkpoint.folder import Loaded
from gspo.checkpoint.saver import SavedModels
from gspo.checkpoint.tensor_sets import TensorSet, stored_set
from gspo.metrics import Metrics
from gspo.training.critic import Critic
from gspo.training.lora import Adapters, num_trained
from gspo.training.model_reward import RewardModelRole
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.parallel.fsdp import full
from gspo.training.policy import LossFunction, Policy, Regulariser, Supervision, Upcoming, Update
from gspo.training.reference import Reference
from gspo.training.reward_model import RewardModel
from gspo.training.router_change import RouterWatch
from gspo.types import AdvantageBatch, Batch, ScoredBatch, TrainBatch

ADAPTER_FILES = "adapter/adapter_model"  # under training/, as peft names it
SAMPLED_ELEMENTS = 1024  # of every frozen tensor: enough to identify a model


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """Sizes and identity of the policy, for messages and for checks on resume."""

    num_trained: int
    num_parameters: int
    device: str
    layout_problem: str | None  # why training runs in padded rows although the config says packed
    shapes: list[tuple[str, list[int], str]]
    frozen_digest: str | None
    has_critic: bool
    has_reference: bool
    has_reward_model: bool = False
    num_ranks: int | None = None  # None without sharding
    ranks_per_sequence: int = 1


class PolicyRole(Protocol):
    """The model being trained."""

    def score(self, batch: TrainBatch) -> ScoredBatch:
        """The batch with π_old and entropies."""
        ...

    def log_probs(self, batch: TrainBatch) -> tuple[Tensor, Tensor]:
        """Log-probs and entropies [B,T] of the responses under the current weights."""
        ...


class ReferenceRole(Protocol):
    """The frozen reference."""

    def log_probs(self, batch: TrainBatch) -> Tensor:
        """Log-probs [B,T] of the responses."""
        ...

    def score(self, batch: Batch) -> Batch:
        """The batch with `ref_log_probs`."""
        ...


class CriticRole(Protocol):
    """The value model."""

    def score(self, batch: Batch) -> Batch:
        """The batch with `values`."""
        ...

    def update(self, batch: AdvantageBatch, *, step: int) -> Metrics:
        """Train the critic on a batch."""
        ...


class Roles(SavedModels, Protocol):
    """The models of one run. A role that the config does not use is None."""

    @property
    def policy(self) -> PolicyRole: ...

    @property
    def critic(self) -> CriticRole | None: ...

    @property
    def reference(self) -> ReferenceRole | None: ...

    @property
    def reward_model(self) -> RewardModelRole | None: ...

    def facts(self) -> PolicyFacts:
        """Sizes and identity of the policy."""
        ...

    def update_policy(
        self,
        batch: AdvantageBatch,
        loss: LossFunction,
        *,
        step: int,
        regulariser: Regulariser | None = None,
        upcoming: Upcoming | None = None,
        beside: Supervision | None = None,
    ) -> Update:
        """Train the policy on a batch, and on the examples `beside` it.

        `upcoming` makes the next batch; it may be called while this one is trained on.
        """
        ...

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rates of this run's schedules."""
        ...

    def published_weights(self) -> AbstractContextManager[Mapping[str, Tensor]]:
        """A context with the policy's tensors, adapters merged in, under the names of the model without adapters."""
        ...

    def without_state(self) -> dict[str, list[str]]:
        """By optimiser, the parameters that no update has reached. A checkpoint has no moments of them."""
        ...

    def load(self, loaded: Loaded, *, reset: bool = False) -> list[str]:
        """Restore the training state of a checkpoint. The weights were loaded with the model.

        CheckpointError names state that is missing or does not fit; with `reset` that of optimisers starts at 0.
        Returns notes for the user.
        """
        ...

    def stacks(self) -> str:
        """The stacks of the ranks in other processes; "" when there are none."""
        ...

    def close(self) -> None:
        """Free the models and end their processes."""
        ...


@dataclass
class LocalRoles:
    """The models in this process. `reference` may share the policy's model, with adapters switched off."""

    policy: Policy
    adapters: Adapters | None = None
    critic: Critic | None = None
    reference: Reference | None = None
    reward_model: RewardModel | None = None

    def __post_init__(self) -> None:
        self.routers = RouterWatch(self.policy.model, self.policy.ranks)

    def facts(self) -> PolicyFacts:
        policy = self.policy
        trained, num = num_trained(policy.model)
        shapes = [(name, list(p.shape), str(p.dtype)) for name, p in policy.model.named_parameters()]
        return PolicyFacts(
            num_trained=trained,
            num_parameters=num,
            device=str(policy.device),
            layout_problem=policy.runner.reason,
            shapes=shapes,
            frozen_digest=self.frozen_digest(),
            has_critic=self.critic is not None,
            has_reference=self.reference is not None,
            has_reward_model=self.reward_model is not None,
        )

    def update_policy(
        self,
        batch: AdvantageBatch,
        loss: LossFunction,
        *,
        step: int,
        regulariser: Regulariser | None = None,
        upcoming: Upcoming | None = None,
        beside: Supervision | None = None,
    ) -> Update:
        """Train the policy on a batch. Metrics of a mixture of experts include `actor/router_change`."""
        with self.routers.watching(batch) as routing:
            update = self.policy.update(
                batch, loss, step=step, regulariser=regulariser, upcoming=upcoming, beside=beside
            )
        return dataclasses.replace(update, metrics=update.metrics | routing)

    def scale_lr(self, factor: float) -> None:
        for role in (self.policy, self.critic):
            if role is not None:
                role.schedule = dataclasses.replace(role.schedule, lr=role.schedule.lr * factor)

    @property
    def saves_in_background(self) -> bool:
        """Not with adapters: saving merges them into the model for a while."""
        return self.adapters is None

    def save_model(self, folder: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the policy, adapters merged in, as a Hugging Face folder, with their config in `training/`.

        `weights` are an earlier result of `weights()`, for a model without adapters.
        """
        if self.adapters is None:
            self.policy.model.save_pretrained(folder, state_dict=weights)
            return
        with self.adapters.merged() as merged:
            self.policy.model.save_pretrained(folder, state_dict=merged)
        self.adapters.save_config((folder / "training" / ADAPTER_FILES).parent)

    def tensors(self) -> dict[str, TensorSet]:
        sets = {"optimizer": self.policy.optimizer.state_tensors()}
        if self.adapters is not None:
            sets[ADAPTER_FILES] = self.adapters.state_tensors()
        return sets if self.critic is None else {**sets, **self.critic.state_tensors()}

    def weights(self) -> dict[str, Tensor]:
        return self.policy.model.state_dict()

    @contextmanager
    def published_weights(self) -> Iterator[Mapping[str, Tensor]]:
        if self.adapters is None:
            yield self.weights()
        else:
            with self.adapters.merged() as tensors:
                yield tensors

    @property
    def write_shards(self) -> None:
        """None: `tensors` has everything."""

    def stacks(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing to do: the models are freed with this object."""

    def without_state(self) -> dict[str, list[str]]:
        return {name: names for name, o in self._optimizers().items() if (names := o.without_state())}

    def _optimizers(self) -> dict[str, MasterOptimizer]:
        own = {"optimizer": self.policy.optimizer}
        return own if self.critic is None else {**own, "critic/optimizer": self.critic.optimizer}

    def load(self, loaded: Loaded, *, reset: bool = False) -> list[str]:
        folder = loaded.path / "training"
        expected: dict[str, Shapes] = {
            name: {key: tuple(t.shape) for key, t in members.items()} for name, members in self.tensors().items()
        }
        expected |= {name: optimizer.state_shapes() for name, optimizer in self._optimizers().items()}
        stored = {name: stored_set(name, folder) for name in {*expected, *loaded.set_names}}
        unusable, notes = check_sets(loaded.path, loaded.state, expected, stored, reset=reset)
        sets = loaded.tensors
        check_numbers(loaded.path, {**sets, "the model": self.policy.model.state_dict()})
        for name, keys in unusable.items():  # a parameter's step and moments are restored together or not at all
            parameters = {key.partition("/")[2] for key in keys if not key.startswith("master/")}
            sets[name] = {
                key: tensor
                for key, tensor in sets.get(name, {}).items()
                if key not in keys and (key.startswith("master/") or key.partition("/")[2] not in parameters)
            }
        if self.adapters is not None:
            self.adapters.load_state_tensors(sets[ADAPTER_FILES])
        self.policy.optimizer.load_state_tensors(sets["optimizer"])
        if self.critic is not None:
            self.critic.load_state_tensors(sets)
        return notes

    def frozen_digest(self) -> str | None:
        """Identifies the weights that checkpoints do not contain: those under adapters, the reference's, the reward model's."""
        models = [self.policy.model] if self.adapters is not None else []
        if self.reference is not None and self.reference.scorer is not self.policy:
            models.append(self.reference.scorer.model)
        if self.reward_model is not None:
            models.append(self.reward_model.scorer)
        if not models:
            return None
        digest = hashlib.sha256()
        for model in models:
            for name, p in model.named_parameters():
                if not p.requires_grad:
                    sample = full(p.detach()).flatten()[:SAMPLED_ELEMENTS].float().cpu()
                    digest.update(name.encode() + sample.numpy().tobytes())
        return digest.hexdigest()[:16]


def check_numbers(path: Path, sets: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Refuse tensors of a checkpoint that no training leaves: not finite, or a second moment or step below 0."""
    for name, members in sets.items():
        for key, tensor in members.items():
            plain = full(tensor.detach())
            if not plain.is_floating_point():
                continue
            if not bool(plain.isfinite().all()):
                raise CheckpointError(f"{path}: {key} of {name} has values that are not finite")
            if key.startswith(("exp_avg_sq/", "step/")) and bool((plain < 0).any()):
                raise CheckpointError(f"{path}: {key} of {name} has negative values")
