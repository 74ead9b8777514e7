"""GSPO: post-train language models with reinforcement learning on verifiable rewards.

The public names are below. They load on first use: `import gspo` reads no file and imports no library.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.algo.advantages import advantage_estimator
    from gspo.algo.losses import policy_loss
    from gspo.config import TrainerConfig
    from gspo.config import load as load_config
    from gspo.data.datasets import dataset
    from gspo.environments.loading import environment
    from gspo.loop.callbacks import Callback, callback
    from gspo.loop.run import train
    from gspo.loop.supervised import SupervisedTrainer
    from gspo.loop.trainer import Trainer
    from gspo.rewards.builtin import reward
    from gspo.rollout.workers.worker import engine
    from gspo.runs.sinks import sink
    from gspo.sampling.filters import group_filter
    from gspo.types import Group, Prompt, Reward, Rollout

__version__ = "0.1.0"

__all__ = [
    "Callback",
    "Group",
    "Prompt",
    "Reward",
    "Rollout",
    "SupervisedTrainer",
    "Trainer",
    "TrainerConfig",
    "advantage_estimator",
    "callback",
    "dataset",
    "engine",
    "environment",
    "group_filter",
    "load_config",
    "policy_loss",
    "reward",
    "sink",
    "train",
]

_HOMES = {
    "Callback": "gspo.loop.callbacks:Callback",
    "Group": "gspo.types:Group",
    "Prompt": "gspo.types:Prompt",
    "Reward": "gspo.types:Reward",
    "Rollout": "gspo.types:Rollout",
    "SupervisedTrainer": "gspo.loop.supervised:SupervisedTrainer",
    "Trainer": "gspo.loop.trainer:Trainer",
    "TrainerConfig": "gspo.config:TrainerConfig",
    "advantage_estimator": "gspo.algo.advantages:advantage_estimator",
    "callback": "gspo.loop.callbacks:callback",
    "dataset": "gspo.data.datasets:dataset",
    "engine": "gspo.rollout.workers.worker:engine",
    "environment": "gspo.environments.loading:environment",
    "group_filter": "gspo.sampling.filters:group_filter",
    "load_config": "gspo.config:load",
    "policy_loss": "gspo.algo.losses:policy_loss",
    "reward": "gspo.rewards.builtin:reward",
    "sink": "gspo.runs.sinks:sink",
    "train": "gspo.loop.run:train",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'gspo' has no attribute {name!r}")
    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
