"""verl's names for a Ray cluster: trainer class, roles, resource pools, worker groups."""

from importlib.util import find_spec

if find_spec("ray") is None:
    raise ModuleNotFoundError("gspo.cluster needs Ray, which is not installed: pip install 'gspo[ray]'", name="ray")

from gspo.compat.verl_ray_trainer import RayPPOTrainerWithSampling as RayPPOTrainerWithSampling
from gspo.distributed.backend import ClusterError as ClusterError
from gspo.distributed.rank_worker import RankWorker as RankWorker
from gspo.distributed.ray.backend import RayBackend as RayBackend
from gspo.distributed.ray.connection import RayConnection as RayConnection
from gspo.distributed.ray.ranks import RayRanks as RayRanks
from gspo.distributed.ray.resource_pool import ResourcePool as ResourcePool
from gspo.distributed.ray.resource_pool import ResourcePoolManager as ResourcePoolManager
from gspo.distributed.ray.resource_pool import Role as Role
from gspo.distributed.ray.session import RaySession as RaySession
from gspo.rollout.workers.worker import RolloutWorker as RolloutWorker

RayPPOTrainer = RayPPOTrainerWithSampling  # dynamic sampling is a key, not another class
RayResourcePool = ResourcePool  # verl's name
RayWorkerGroup = RayRanks  # verl's name
RayTeam = RayRanks  # its name in 0.1
