"""verl's path of the trainer with dynamic sampling: `from gspo.trainer.ppo.ray_trainer_with_sampling import …`."""

from gspo.cluster import *  # noqa: F403
