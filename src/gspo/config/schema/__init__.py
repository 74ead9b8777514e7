"""The whole key tree: `TrainerConfig` and its sections, with the names and keys of verl."""

from __future__ import annotations

from gspo.config.schema.actor import ActorConfig, RefConfig
from gspo.config.schema.algorithm import AlgoConfig
from gspo.config.schema.critic import CriticConfig
from gspo.config.schema.data import DataConfig
from gspo.config.schema.environment import EnvironmentConfig
from gspo.config.schema.fields import Section, key
from gspo.config.schema.model import ModelConfig
from gspo.config.schema.reward import CustomRewardFunctionConfig, RewardConfig, RewardModelConfig
from gspo.config.schema.rollout import RolloutConfig
from gspo.config.schema.trainer import PPOTrainerConfig


class ActorRolloutRefConfig(Section):
    """The policy in its three roles: trained, generating, and frozen as the reference."""

    model: ModelConfig = key(factory=ModelConfig, doc="The model.")
    actor: ActorConfig = key(factory=ActorConfig, doc="The policy being trained.")
    rollout: RolloutConfig = key(factory=RolloutConfig, doc="Generation of responses.")
    ref: RefConfig = key(factory=RefConfig, doc="The frozen reference model.")


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
    environment: EnvironmentConfig = key(factory=EnvironmentConfig, doc="What the model talks to between its turns.")
    trainer: PPOTrainerConfig = key(factory=PPOTrainerConfig, doc="The run.")
