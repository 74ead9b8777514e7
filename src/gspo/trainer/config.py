"""The config classes under verl's path: `from gspo.trainer.config import TrainerConfig, AlgoConfig, …`."""

from gspo.config import *  # noqa: F403
