"""Resource pools: Ray placement groups for the processes of a run, the roles of a run, and which pool each uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from gspo.distributed.backend import ClusterError

PLACEMENT_SECONDS = 60.0  # how long to wait for devices that other runs hold


class Role(Enum):
    """The roles of a run under verl's names. Trainer ranks run actor, critic and reference; rollout workers Rollout."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    ActorRolloutRef = "actor_rollout_ref"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"

    def __str__(self) -> str:
        return f"Role.{self.name}"


# Any of these names the trainer ranks; the first in a mapping counts.
TRAINER_ROLES = (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor)
# These run inside the trainer ranks, beside the policy.
INNER_ROLES = (Role.Critic, Role.RefPolicy)


class ResourcePool:
    """`process_on_nodes[i]` processes on the i-th machine, each with `devices` GPUs, or one CPU if `use_gpu` is false.

    `max_colocate_count` actors share the devices of a process in equal parts.
    """

    def __init__(
        self,
        process_on_nodes: Sequence[int],
        use_gpu: bool = True,
        name_prefix: str = "",
        max_colocate_count: int = 1,
        devices: int = 1,
    ) -> None:
        bad = not process_on_nodes or any(not isinstance(n, int) or n < 1 for n in process_on_nodes)
        if bad or max_colocate_count < 1 or devices < 1:
            raise ClusterError(
                f"resource pool {name_prefix!r}: process_on_nodes={list(process_on_nodes)}, max_colocate_count="
                f"{max_colocate_count}, devices={devices}; expected whole numbers of at least 1, e.g. [8, 8]"
            )
        self.process_on_nodes = list(process_on_nodes)
        self.use_gpu = use_gpu
        self.name_prefix = name_prefix
        self.max_colocate_count = max_colocate_count
        self.devices = devices
        self._groups: list[PlacementGroup] | None = None

    @property
    def world_size(self) -> int:
        return sum(self.process_on_nodes)

    @property
    def num_gpus(self) -> int:
        return self.world_size * self.devices if self.use_gpu else 0

    @property
    def num_cpus(self) -> int:
        return self.world_size * self.max_colocate_count

    def get_placement_groups(self, strategy: str = "STRICT_PACK") -> list[PlacementGroup]:
        """One placement group per machine, reserved at the first call; ClusterError if that takes too long."""
        if self._groups is None:
            groups = [self._request(n, strategy) for n in self.process_on_nodes]
            self._await(groups)
            self._groups = groups
        return self._groups

    def _request(self, num_processes: int, strategy: str = "STRICT_PACK") -> PlacementGroup:
        bundle: dict[str, float] = {"CPU": self.max_colocate_count}
        if self.use_gpu:
            bundle["GPU"] = self.devices
        return placement_group([dict(bundle) for _ in range(num_processes)], strategy=strategy)

    def grow(self) -> None:
        """Add a place for one process on any machine; ClusterError when there is none."""
        groups = self.get_placement_groups()
        added = self._request(1)
        self._await([added])
        groups.append(added)
        self.process_on_nodes.append(1)

    def _await(self, groups: list[PlacementGroup]) -> None:
        _, waiting = ray.wait([g.ready() for g in groups], num_returns=len(groups), timeout=PLACEMENT_SECONDS)
        if waiting:
            for group in groups:
                remove_placement_group(group)
            free = {name: ray.available_resources().get(name, 0.0) for name in ("CPU", "GPU")}
            raise ClusterError(
                f"resource pool {self.name_prefix!r}: {len(waiting)} of {len(groups)} machines did not get their "
                f"places within {PLACEMENT_SECONDS:.0f} s (machines of {self.process_on_nodes} processes, "
                f"{self.num_gpus} GPUs and {self.num_cpus} CPUs in all); free now: {free}. "
                "Wait for other runs to end, or lower trainer.nnodes, trainer.n_gpus_per_node or rollout.num_workers"
            )

    def options(self, rank: int) -> dict[str, Any]:
        """The actor options that place process `rank` in the pool."""
        index = rank % self.world_size
        for group, size in zip(self.get_placement_groups(), self.process_on_nodes, strict=True):
            if index < size:
                return {
                    "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
                    "num_cpus": 1,
                    "num_gpus": self.devices / self.max_colocate_count if self.use_gpu else 0,
                }
            index -= size
        raise AssertionError(f"rank {rank} of a pool of {self.world_size}")

    def release(self) -> None:
        """Release the placement groups; Ray ends the processes that still run there."""
        groups, self._groups = self._groups or [], None
        if ray.is_initialized():
            for group in groups:
                remove_placement_group(group)


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

    def create_resource_pool(self, use_gpu: bool | None = None, devices: Mapping[str, int] | None = None) -> None:
        """Create the pools that roles use, after checking that the cluster is large enough.

        `use_gpu` None means GPUs if the cluster has some. `devices` is the number of GPUs per process by pool (default
        1).
        """
        if self.resource_pool_dict:
            return
        if use_gpu is None:
            use_gpu = ray.cluster_resources().get("GPU", 0) > 0
        pools = {
            name: ResourcePool(spec, use_gpu, name, max(1, self._num_tenants(name)), (devices or {}).get(name, 1))
            for name, spec in self.resource_pool_spec.items()
            if name in self.mapping.values()
        }
        self._check_resource_available(pools)
        self.resource_pool_dict = pools

    def _num_tenants(self, pool: str) -> int:
        """Number of kinds of process in a pool: 2 where rollout workers share it with trainer ranks, else 1."""
        return len({role is Role.Rollout for role, name in self.mapping.items() if name == pool})

    def get_resource_pool(self, role: Role) -> ResourcePool:
        """The pool of a role; `create_resource_pool` comes first."""
        if role not in self.mapping:
            raise ClusterError(f"{role} has no pool; mapping has {', '.join(map(str, self.mapping))}")
        if self.mapping[role] not in self.resource_pool_dict:
            raise ClusterError(f"pool {self.mapping[role]!r} is not created yet; call create_resource_pool() first")
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Number of processes of all pools, as verl counts them."""
        return sum(n for spec in self.resource_pool_spec.values() for n in spec)

    def _check_resource_available(self, pools: Mapping[str, ResourcePool]) -> None:
        has = ray.cluster_resources()
        needs = {"GPU": sum(p.num_gpus for p in pools.values()), "CPU": sum(p.num_cpus for p in pools.values())}
        for kind, needed in needs.items():
            if needed > has.get(kind, 0):
                sizes = {name: pool.process_on_nodes for name, pool in pools.items()}
                raise ClusterError(
                    f"the pools {sizes} need {needed} {kind}s, the cluster has {has.get(kind, 0):g}; lower "
                    "trainer.nnodes, trainer.n_gpus_per_node or rollout.num_workers, or add machines"
                )

    def release(self) -> None:
        """Release all pools."""
        for pool in self.resource_pool_dict.values():
            pool.release()
        self.resource_pool_dict = {}
