"""Ray: the trainer of verl's name, roles and resource pools, teams and connections. The only importer of ray."""

from __future__ import annotations

from importlib.util import find_spec

if find_spec("ray") is None:
    raise ModuleNotFoundError(
        "gspo.cluster needs Ray, which is not installed: pip install 'gspo[ray]'", name="ray"
    )

from gspo.cluster.backend import RayBackend
from gspo.cluster.ray_connection import RayConnection
from gspo.cluster.ray_team import RayTeam
from gspo.cluster.resource_pool import ResourcePool
from gspo.cluster.resource_pool_manager import ResourcePoolManager
from gspo.cluster.role import Role
from gspo.cluster.session import RaySession
from gspo.cluster.trainer import RayPPOTrainerWithSampling
from gspo.loop.backend import ClusterError
from gspo.loop.rank_worker import RankWorker
from gspo.rollout.workers.worker import RolloutWorker

RayPPOTrainer = RayPPOTrainerWithSampling  # dynamic sampling is a key, not another class
RayResourcePool = ResourcePool  # verl's name
RayWorkerGroup = RayTeam  # verl's name

__all__ = [
    "ClusterError",
    "RankWorker",
    "RayBackend",
    "RayConnection",
    "RayPPOTrainer",
    "RayPPOTrainerWithSampling",
    "RayResourcePool",
    "RaySession",
    "RayTeam",
    "RayWorkerGroup",
    "ResourcePool",
    "ResourcePoolManager",
    "Role",
    "RolloutWorker",
]
