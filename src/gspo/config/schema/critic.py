"""The `critic` section: the value function of PPO."""

from __future__ import annotations

from gspo.config.schema.fields import Section, key, mark_explicit
from gspo.config.schema.model import FSDPConfig, OptimConfig


class CriticModelConfig(Section):
    """The model of the value function."""

    path: str | None = key(
        default=None, doc="Folder or hub name of the model that gets a value head; null = the policy's model."
    )


class CriticConfig(Section):
    """The value function, trained when algorithm.adv_estimator is gae."""

    enable: bool | None = key(default=None, doc="Train a critic; null = only when the advantage estimator needs one.")
    model: CriticModelConfig = key(factory=CriticModelConfig, doc="The model of the value function.")
    optim: OptimConfig = key(factory=lambda: mark_explicit(OptimConfig(lr=1e-5), ()), doc="Optimiser of the critic.")
    ppo_mini_batch_size: int | None = key(
        default=None,
        doc="Prompts per optimiser step of the critic; null = actor.ppo_mini_batch_size.",
        gt=0,
        unit="prompts",
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        default=None,
        doc="Responses per forward pass of the critic; null = fill forward passes by tokens.",
        gt=0,
        unit="responses",
    )
    ppo_max_token_len_per_gpu: int | None = key(
        default=None,
        doc="Most tokens per forward pass of the critic; null = actor.ppo_max_token_len_per_gpu.",
        gt=0,
        unit="tokens",
    )
    ppo_epochs: int | None = key(
        default=None, doc="Passes of the critic over each rollout batch; null = actor.ppo_epochs.", gt=0
    )
    cliprange_value: float = key(
        default=0.5, doc="How far a predicted value may move within a step before the loss clips it.", gt=0
    )
    grad_clip: float = key(
        default=1.0, doc="Largest gradient norm of the critic. Larger gradients are scaled down to it.", gt=0
    )
    fsdp_config: FSDPConfig = key(factory=FSDPConfig, doc="Sharding of the critic.")
