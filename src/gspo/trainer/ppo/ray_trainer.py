"""The names of `gspo.cluster` under verl's path: `from gspo.trainer.ppo.ray_trainer import RayPPOTrainer, Role, …`."""

from gspo.cluster import *  # noqa: F403
