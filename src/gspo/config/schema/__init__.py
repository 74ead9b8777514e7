"""The whole key tree: `TrainerConfig` and its sections, with the names and keys of verl."""

from __future__ import annotations

from gspo.config.schema.actor import ActorConfig, PolicyLossConfig, RefConfig
from gspo.config.schema.algorithm import AlgoConfig, FilterGroupsConfig, KLControlConfig
from gspo.config.schema.critic import CriticConfig, CriticModelConfig
from gspo.config.schema.data import DataConfig
from gspo.config.schema.fields import Section, key, section
from gspo.config.schema.model import FSDPConfig, ModelConfig, OptimConfig
from gspo.config.schema.reward import (
    CustomRewardFunctionConfig,
    OverlongBufferConfig,
    RewardConfig,
    RewardKwargs,
    RewardModelConfig,
)
from gspo.config.schema.rollout import RolloutConfig, ValKwargs
from gspo.config.schema.trainer import PPOTrainerConfig


@section
class ActorRolloutRefConfig(Section):
    """The policy in its three roles: trained, generating, and frozen as the reference."""

    model: ModelConfig = key(factory=ModelConfig, doc="The model.")
    actor: ActorConfig = key(factory=ActorConfig, doc="The policy being trained.")
    rollout: RolloutConfig = key(factory=RolloutConfig, doc="Generation of responses.")
    ref: RefConfig = key(factory=RefConfig, doc="The frozen reference model.")


@section
class TrainerConfig(Section):
    """The configuration of a run."""

    algorithm: AlgoConfig = key(factory=AlgoConfig, doc="Advantages, KL in the reward, dynamic sampling.")
    data: DataConfig = key(factory=DataConfig, doc="Prompts and batch sizes.")
    actor_rollout_ref: ActorRolloutRefConfig = key(factory=ActorRolloutRefConfig, doc="The policy.")
    critic: CriticConfig = key(factory=CriticConfig, doc="The value function.")
    reward_model: RewardModelConfig = key(factory=RewardModelConfig, doc="The reward manager.")
    reward: RewardConfig = key(factory=RewardConfig, doc="Reward functions and the processes that run them.")
    custom_reward_function: CustomRewardFunctionConfig = key(
        factory=CustomRewardFunctionConfig, doc="Your own reward function."
    )
    trainer: PPOTrainerConfig = key(factory=PPOTrainerConfig, doc="The run.")


__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgoConfig",
    "CriticConfig",
    "CriticModelConfig",
    "CustomRewardFunctionConfig",
    "DataConfig",
    "FSDPConfig",
    "FilterGroupsConfig",
    "KLControlConfig",
    "ModelConfig",
    "OptimConfig",
    "OverlongBufferConfig",
    "PPOTrainerConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RewardConfig",
    "RewardKwargs",
    "RewardModelConfig",
    "RolloutConfig",
    "TrainerConfig",
    "ValKwargs",
]
