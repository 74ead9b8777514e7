"""verl's path: `from gspo.trainer.ppo.ray_trainer import RayPPOTrainer, ResourcePoolManager, Role`."""

from __future__ import annotations

from gspo.cluster import (
    RayPPOTrainer,
    RayPPOTrainerWithSampling,
    RayResourcePool,
    RayWorkerGroup,
    ResourcePoolManager,
    Role,
)

__all__ = [
    "RayPPOTrainer",
    "RayPPOTrainerWithSampling",
    "RayResourcePool",
    "RayWorkerGroup",
    "ResourcePoolManager",
    "Role",
]
