"""The `critic` section: the value function of PPO."""

from __future__ import annotations

from gspo.config.schema.fields import Section, as_default, key, section
from gspo.config.schema.model import FSDPConfig, OptimConfig


@section
class CriticModelConfig(Section):
    """The value function's model."""

    path: str | None = key(default=None, doc="Model with a value head put on; null = the policy's model.")


@section
class CriticConfig(Section):
    """The value function: used when algorithm.adv_estimator is gae."""

    enable: bool | None = key(
        default=None, doc="Train a critic; null = when the advantage estimator needs one."
    )
    model: CriticModelConfig = key(factory=CriticModelConfig, doc="The value function's model.")
    optim: OptimConfig = key(factory=lambda: as_default(OptimConfig(lr=1e-5)), doc="Optimiser of the critic.")
    ppo_mini_batch_size: int | None = key(
        default=None, doc="Prompts an optimiser step; null = actor.ppo_mini_batch_size.", gt=0
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        default=None, doc="Responses a forward; null = by token budget.", gt=0
    )
    ppo_max_token_len_per_gpu: int | None = key(
        default=None,
        doc="Token budget of a forward; null = actor.ppo_max_token_len_per_gpu.",
        gt=0,
        unit="tokens",
    )
    ppo_epochs: int | None = key(
        default=None, doc="Passes over each rollout batch; null = actor.ppo_epochs.", gt=0
    )
    cliprange_value: float = key(default=0.5, doc="Largest move of a value within a step.", gt=0)
    grad_clip: float = key(default=1.0, doc="Largest gradient norm of the critic.", gt=0)
    fsdp_config: FSDPConfig = key(factory=FSDPConfig, doc="Sharding of the critic.")
