"""The Ray backend: a session, resource pools, and the actors of a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from gspo.config import TrainerConfig
from gspo.distributed.ray.connection import RayConnection
from gspo.distributed.ray.placement import make_pools, num_local_cpus, trainer_role, worker_classes
from gspo.distributed.ray.ranks import RayRanks
from gspo.distributed.ray.resource_pool import ResourcePool, ResourcePoolManager, Role
from gspo.distributed.ray.session import RaySession
from gspo.distributed.ray.weight_store import ObjectStore
from gspo.distributed.run_layout import rollout_dtype
from gspo.rollout.workers.worker import EngineSpec


class RayBackend:
    """Starts trainer ranks and rollout workers as Ray actors.

    `role_worker_mapping` replaces worker classes, `resource_pool_manager` the default pools. `rank_group_class` is
    RayRanks or a subclass.
    """

    def __init__(
        self,
        role_worker_mapping: dict[Role, Any] | None = None,
        resource_pool_manager: ResourcePoolManager | None = None,
        rank_group_class: type[RayRanks] = RayRanks,
    ) -> None:
        self._rank_class, self._rollout_class = worker_classes(role_worker_mapping)
        self._manager = resource_pool_manager
        self._rank_group_class = rank_group_class
        self._config = TrainerConfig()
        self._session: RaySession | None = None
        self._pools: ResourcePoolManager | None = None

    def start(self, config: TrainerConfig) -> None:
        """Connect and reserve the pools. A second call keeps those of the first."""
        if self._pools is not None:
            return
        self._config = config
        self._session = RaySession(num_cpus=num_local_cpus(config, self._manager))
        try:
            self._pools = make_pools(config, self._manager)
        except BaseException:
            self.close()
            raise

    def ranks(self) -> RayRanks:
        """New trainer ranks, joined and without models."""
        assert self._pools is not None, "start() comes first"
        pool = self._pools.get_resource_pool(trainer_role(self._pools))
        return self._rank_group_class(pool, self._rank_class)

    def num_rollout_workers(self) -> int:
        """Places in the rollout pool; 0 when the trainer's ranks generate."""
        pool = self._rollout_pool()
        return pool.world_size if pool else 0

    def connect(self, spec: EngineSpec, index: int) -> RayConnection:
        """Start a rollout worker at place `index` of its pool. The pool grows to hold it."""
        pool = self._rollout_pool()
        assert pool is not None, "the run has no rollout workers"
        while index >= pool.world_size:
            pool.grow()
        placed = _place(spec, pool, self._config)
        return RayConnection(placed, pool.options(index), self._rollout_class, f"rollout worker {index}")

    def weights(self) -> ObjectStore:
        """The object store, through which rollout workers receive versions of the weights."""
        return ObjectStore()

    def _rollout_pool(self) -> ResourcePool | None:
        if self._pools is None or Role.Rollout not in self._pools.mapping:
            return None
        return self._pools.get_resource_pool(Role.Rollout)

    def close(self) -> None:
        """Release the pools, which ends their processes, and leave the cluster. May be called twice."""
        if self._pools is not None:
            self._pools.release()
            self._pools = None
        if self._session is not None:
            self._session.close()
            self._session = None


def _place(spec: EngineSpec, pool: ResourcePool, config: TrainerConfig) -> EngineSpec:
    """The spec for a worker of the pool, whose device may differ from the controller's."""
    device = torch.device("cuda:0" if pool.use_gpu else "cpu")
    placed = dataclasses.replace(spec, dtype=rollout_dtype(config, device))
    return placed.on_device(str(device), shared=pool.use_gpu and pool.max_colocate_count > 1)
