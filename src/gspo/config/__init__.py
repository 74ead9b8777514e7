"""The configuration: a typed schema, loading with origins, names of other systems, rules between keys."""

from gspo.config.batch_plan import BatchPlan
from gspo.config.loading.resolve import ResolvedConfig, load, load_supervised
from gspo.config.problems import ConfigErrors, Problem
from gspo.config.resolved_loss import ResolvedLoss, resolved_loss
from gspo.config.schema import ActorRolloutRefConfig, TrainerConfig
from gspo.config.schema.actor import ActorConfig, PolicyLossConfig, RefConfig
from gspo.config.schema.algorithm import AlgoConfig, FilterGroupsConfig, KLControlConfig
from gspo.config.schema.critic import CriticConfig, CriticModelConfig
from gspo.config.schema.data import DataConfig
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

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AlgoConfig",
    "BatchPlan",
    "ConfigErrors",
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
    "Problem",
    "RefConfig",
    "ResolvedConfig",
    "ResolvedLoss",
    "RewardConfig",
    "RewardKwargs",
    "RewardModelConfig",
    "RolloutConfig",
    "TrainerConfig",
    "ValKwargs",
    "load",
    "load_supervised",
    "resolved_loss",
]
