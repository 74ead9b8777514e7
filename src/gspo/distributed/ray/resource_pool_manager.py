"""Which role runs in which pool of devices, under verl's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import ray

from gspo.distributed.ray.errors import ClusterError
from gspo.distributed.ray.resource_pool import ResourcePool
from gspo.distributed.ray.role import Role


@dataclass
class ResourcePoolManager:
    """`resource_pool_spec` says how many processes each pool has on each machine, `mapping` which pool a role uses.

    `ResourcePoolManager({"global_pool": [8, 8]}, {Role.ActorRollout: "global_pool"})` is 16 processes on 2 machines.
    A process is one GPU, or one CPU where the run uses none.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    resource_pool_dict: dict[str, ResourcePool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for role, pool in self.mapping.items():
            if not isinstance(role, Role):
                raise ClusterError(f"mapping: {role!r} is not a gspo.cluster.Role")
            if pool not in self.resource_pool_spec:
                raise ClusterError(
                    f"mapping[{role}]={pool!r}: no such pool; resource_pool_spec has {sorted(self.resource_pool_spec)}"
                )

    def create_resource_pool(
        self, use_gpu: bool | None = None, devices: Mapping[str, int] | None = None
    ) -> None:
        """Make the pools that roles use, after checking that the cluster has what they need.

        `use_gpu` None: where the cluster has GPUs. `devices` gives the GPUs of one process in a pool (default 1).
        """
        if self.resource_pool_dict:
            return
        if use_gpu is None:
            use_gpu = ray.cluster_resources().get("GPU", 0) > 0
        pools = {
            name: ResourcePool(
                spec, use_gpu, name, max(1, self._num_tenants(name)), (devices or {}).get(name, 1)
            )
            for name, spec in self.resource_pool_spec.items()
            if name in self.mapping.values()
        }
        self._check_resource_available(pools)
        self.resource_pool_dict = pools

    def _num_tenants(self, pool: str) -> int:
        """Kinds of processes in a pool: rollout workers beside trainer ranks, or one of them alone."""
        return len({role is Role.Rollout for role, name in self.mapping.items() if name == pool})

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """The pool of a role; `create_resource_pool` comes first."""
        if role not in self.mapping:
            raise ClusterError(f"{role} has no pool; mapping has {', '.join(map(str, self.mapping))}")
        if self.mapping[role] not in self.resource_pool_dict:
            raise ClusterError(
                f"pool {self.mapping[role]!r} is not made yet; call create_resource_pool() first"
            )
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Processes of all pools, as verl counts them."""
        return sum(n for spec in self.resource_pool_spec.values() for n in spec)

    def _check_resource_available(self, pools: Mapping[str, ResourcePool]) -> None:
        has = ray.cluster_resources()
        for kind, needed in (
            ("GPU", sum(p.num_gpus for p in pools.values())),
            ("CPU", sum(p.num_cpus for p in pools.values())),
        ):
            if needed > has.get(kind, 0):
                sizes = {name: pool.process_on_nodes for name, pool in pools.items()}
                raise ClusterError(
                    f"the pools {sizes} need {needed} {kind}s, the cluster has {has.get(kind, 0):g}; lower "
                    "trainer.nnodes, trainer.n_gpus_per_node or rollout.num_workers, or add machines"
                )

    def release(self) -> None:
        """Give all places back."""
        for pool in self.resource_pool_dict.values():
            pool.release()
        self.resource_pool_dict = {}
