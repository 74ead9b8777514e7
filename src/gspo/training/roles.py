"""The models of a run: the policy, and beside it the critic, the reference and adapters where the config asks."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from gspo.checkpoint.folder import Loaded, TensorSet
from gspo.training.critic import Critic
from gspo.training.lora import Adapters, num_trained
from gspo.training.parallel.fsdp import full
from gspo.training.policy import Policy, PolicyLoss, Regulariser, Update
from gspo.training.reference import Reference
from gspo.training.router_change import RouterWatch
from gspo.types import AdvantageBatch, Batch

ADAPTER_FILES = "adapter/adapter_model"  # under training/, as peft names them
SAMPLED_ELEMENTS = 1024  # of every frozen tensor: enough to tell one training of a model from another


@dataclass(frozen=True, slots=True)
class PolicyFacts:
    """What a run says about its policy and what identifies it, whether its weights are here or in other processes."""

    num_trained: int
    num_parameters: int
    device: str
    layout_problem: str | None  # why training runs in padded rows when it was not to
    shapes: list[tuple[str, list[int], str]]
    frozen_digest: str | None
    has_critic: bool
    has_reference: bool
    num_ranks: int | None = None  # None: in this process, without sharding


@dataclass
class Roles:
    """The models of one run and how their weights are saved. `reference` may be the policy with its adapters off."""

    policy: Policy
    adapters: Adapters | None = None
    critic: Critic | None = None
    reference: Reference | None = None

    def __post_init__(self) -> None:
        self.routers = RouterWatch(self.policy.model, self.policy.ranks)

    def facts(self) -> PolicyFacts:
        """What to say about the policy, and what identifies it."""
        policy = self.policy
        trained, num = num_trained(policy.model)
        shapes = [(name, list(p.shape), str(p.dtype)) for name, p in policy.model.named_parameters()]
        return PolicyFacts(
            num_trained=trained,
            num_parameters=num,
            device=str(policy.device),
            layout_problem=policy.layout.reason,
            shapes=shapes,
            frozen_digest=self.frozen_digest(),
            has_critic=self.critic is not None,
            has_reference=self.reference is not None,
        )

    def update_policy(
        self, batch: AdvantageBatch, loss: PolicyLoss, *, step: int, regulariser: Regulariser | None = None
    ) -> Update:
        """Train the policy on a batch; with a router, what it changed is among the metrics."""
        with self.routers.watching(batch) as routing:
            update = self.policy.update(batch, loss, step=step, regulariser=regulariser)
        return dataclasses.replace(update, metrics=update.metrics | routing)

    def scale_lr(self, factor: float) -> None:
        """Multiply the learning rates of this run's schedules."""
        for role in (self.policy, self.critic):
            if role is not None:
                role.schedule = dataclasses.replace(role.schedule, lr=role.schedule.lr * factor)

    def with_reference(self, batch: Batch) -> Batch:
        """The batch scored by the reference, which the config must have asked for."""
        assert self.reference is not None
        return self.reference.score(batch)

    @property
    def saves_aside(self) -> bool:
        """Whether a checkpoint can be written while the models are read: adapters are merged into them for a while."""
        return self.adapters is None

    def save_model(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """The policy as an ordinary Hugging Face folder; adapters are merged into it and described beside.

        `weights` are what `weights()` gave earlier, for a model without adapters.
        """
        if self.adapters is None:
            self.policy.model.save_pretrained(folder, state_dict=weights)
            return
        self.adapters.save_merged(folder)
        self.adapters.save_config((folder / "training" / ADAPTER_FILES).parent)

    def tensors(self) -> dict[str, TensorSet]:
        """What a resume needs beside the policy's folder, by file."""
        sets = {"optimizer": self.policy.optimizer.state_tensors()}
        if self.adapters is not None:
            sets[ADAPTER_FILES] = self.adapters.state_tensors()
        return sets if self.critic is None else {**sets, **self.critic.state_tensors()}

    def weights(self) -> dict[str, Tensor]:
        """The policy's own tensors by name, as they are now."""
        return self.policy.model.state_dict()

    write_shards: ClassVar[None] = None  # `tensors` holds everything, in one piece

    def stacks(self) -> str:
        """Nothing: the models are in this process."""
        return ""

    def close(self) -> None:
        """Nothing: the models are freed with this object."""

    def load(self, loaded: Loaded) -> None:
        """Take up the state of a checkpoint, beside the weights that its folder gave."""
        self.load_tensors(loaded.tensors)

    def load_tensors(self, sets: dict[str, TensorSet]) -> None:
        if self.adapters is not None:
            self.adapters.load_state_tensors(sets[ADAPTER_FILES])
        self.policy.optimizer.load_state_tensors(sets["optimizer"])
        if self.critic is not None:
            self.critic.load_state_tensors(sets)

    def frozen_digest(self) -> str | None:
        """Identifies the weights that no checkpoint holds: those under adapters, and the reference's."""
        models = [self.policy.model] if self.adapters is not None else []
        if self.reference is not None and self.reference.scorer is not self.policy:
            models.append(self.reference.scorer.model)
        if not models:
            return None
        digest = hashlib.sha256()
        for model in models:
            for name, p in model.named_parameters():
                if not p.requires_grad:
                    sample = full(p.detach()).flatten()[:SAMPLED_ELEMENTS].float().cpu()
                    digest.update(name.encode() + sample.numpy().tobytes())
        return digest.hexdigest()[:16]
