"""verl's trainer class on a cluster: `RayPPOTrainerWithSampling`, the same loop with ranks and rollout workers as actors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gspo.compat.verl_trainer import AnyConfig, PPOTrainerWithSampling, with_overrides
from gspo.config import ResolvedConfig
from gspo.distributed.ray.backend import RayBackend
from gspo.distributed.ray.errors import ClusterError
from gspo.distributed.ray.ranks import RayRanks
from gspo.distributed.ray.resource_pool import ResourcePoolManager
from gspo.distributed.ray.role import Role


class RayPPOTrainerWithSampling(PPOTrainerWithSampling):
    """Trains as `config` says on a Ray cluster, with dynamic sampling when `algorithm.filter_groups.enable` is set.

    The cluster is the one this process is connected to, else that of RAY_ADDRESS, else a local one for this run.
    `role_worker_mapping` and `resource_pool_manager` may be None or empty: then trainer.nnodes × n_gpus_per_node ranks
    train, and rollout workers are placed as the rollout section says. `config` is a TrainerConfig, what
    `gspo.config.load` returns, or a mapping of verl's keys. It is checked at once; workers are placed by `init_workers`
    or `fit`.
    """

    def _configure(self, config: AnyConfig, overrides: list[str]) -> ResolvedConfig:
        return with_overrides(config, ["trainer.backend=ray", *overrides])

    def _place(self, roles: Any, pools: Any, group_class: Any) -> RayBackend:
        return RayBackend(_roles(roles), _pools(pools), _group_class(group_class))


def _roles(mapping: Mapping[Role, Any] | None) -> dict[Role, Any]:
    for role in mapping or {}:
        if not isinstance(role, Role):
            raise ClusterError(f"role_worker_mapping: {role!r} is not a gspo.cluster.Role")
    return dict(mapping or {})


def _pools(manager: ResourcePoolManager | None) -> ResourcePoolManager | None:
    if manager is None or isinstance(manager, ResourcePoolManager):
        return manager
    raise ClusterError(
        f"resource_pool_manager={manager!r}: expected a gspo.cluster.ResourcePoolManager, or None for the default pools"
    )


def _group_class(group_class: type[RayRanks] | None) -> type[RayRanks]:
    if group_class is None:
        return RayRanks
    if isinstance(group_class, type) and issubclass(group_class, RayRanks):
        return group_class
    raise ClusterError(
        f"ray_worker_group_cls={group_class!r}: expected gspo.cluster.RayRanks or a class derived from it, or None"
    )
