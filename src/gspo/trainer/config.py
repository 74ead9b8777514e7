"""The config classes under verl's path: `from gspo.trainer.config import TrainerConfig, AlgoConfig, …`."""

from __future__ import annotations

from gspo.config import (
    ActorConfig,
    ActorRolloutRefConfig,
    AlgoConfig,
    CriticConfig,
    CustomRewardFunctionConfig,
    DataConfig,
    FilterGroupsConfig,
    KLControlConfig,
    ModelConfig,
    OptimConfig,
    PolicyLossConfig,
    PPOTrainerConfig,
    RefConfig,
    RewardConfig,
    RewardModelConfig,
    RolloutConfig,
    TrainerConfig,
)

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgoConfig",
    "CriticConfig",
    "CustomRewardFunctionConfig",
    "DataConfig",
    "FilterGroupsConfig",
    "KLControlConfig",
    "ModelConfig",
    "OptimConfig",
    "PPOTrainerConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RewardConfig",
    "RewardModelConfig",
    "RolloutConfig",
    "TrainerConfig",
]
