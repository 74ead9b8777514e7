"""verl's names for a Ray cluster: trainer class, roles, resource pools, worker groups."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("ray") is None:
    raise ModuleNotFoundError("gspo.cluster needs Ray, which is not installed: pip install 'gspo[ray]'", name="ray")

from gspo.compat.verl_ray_trainer import RayPPOTrainerWithSampling
from gspo.distributed.backend import ClusterError
from gspo.distributed.rank_worker import RankWorker
from gspo.distributed.ray.backend import RayBackend
from gspo.distributed.ray.connection import RayConnection
from gspo.distributed.ray.ranks import RayRanks
from gspo.distributed.ray.resource_pool import ResourcePool, ResourcePoolManager
from gspo.distributed.ray.role import Role
from gspo.distributed.ray.session import RaySession
from gspo.rollout.workers.worker import RolloutWorker

RayPPOTrainer = RayPPOTrainerWithSampling  # dynamic sampling is a key, not another class
RayResourcePool = ResourcePool  # verl's name
RayWorkerGroup = RayRanks  # verl's name
RayTeam = RayRanks  # its name in 0.1

__all__ = [
    "ClusterError",
    "RankWorker",
    "RayBackend",
    "RayConnection",
    "RayPPOTrainer",
    "RayPPOTrainerWithSampling",
    "RayRanks",
    "RayResourcePool",
    "RaySession",
    "RayTeam",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "Role",
    "RolloutWorker",
]
