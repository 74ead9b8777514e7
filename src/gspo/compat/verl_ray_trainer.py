"""verl's trainer class on a Ray cluster: trainer ranks and rollout workers are actors."""

from __future__ import annotations

from typing import Any

from gspo.compat.verl_trainer import PPOTrainerWithSampling
from gspo.distributed.backend import ClusterError
from gspo.distributed.ray.backend import RayBackend
from gspo.distributed.ray.ranks import RayRanks
from gspo.distributed.ray.resource_pool import ResourcePoolManager


class RayPPOTrainerWithSampling(PPOTrainerWithSampling):
    """Trains on a Ray cluster, with dynamic sampling when `algorithm.filter_groups.enable` is set.

    The cluster is the one this process is connected to, else that of RAY_ADDRESS, else a local one for this run.
    `role_worker_mapping` and `resource_pool_manager` may be None or empty: then trainer.nnodes × n_gpus_per_node ranks
    train, and the rollout section decides about rollout workers. `config` is a TrainerConfig, the result of
    `gspo.config.load`, or a mapping of verl's keys. It is checked at once; `init_workers` or `fit` starts the workers.
    """

    _overrides = ("trainer.backend=ray",)

    def _place(self, roles: Any, pools: Any, group_class: Any) -> RayBackend:
        if pools is not None and not isinstance(pools, ResourcePoolManager):
            expected = "a gspo.cluster.ResourcePoolManager, or None for the default pools"
            raise ClusterError(f"resource_pool_manager={pools!r}: expected {expected}")
        if group_class is not None and not (isinstance(group_class, type) and issubclass(group_class, RayRanks)):
            expected = "gspo.cluster.RayRanks or a class derived from it, or None"
            raise ClusterError(f"ray_worker_group_cls={group_class!r}: expected {expected}")
        return RayBackend(roles, pools, group_class or RayRanks)
