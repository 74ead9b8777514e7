"""Which processes a run has on a cluster: the pools of its roles and their worker classes."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import ray

from gspo.config import TrainerConfig
from gspo.distributed.backend import ClusterError
from gspo.distributed.rank_worker import RankWorker
from gspo.distributed.ray.actors import plain_class
from gspo.distributed.ray.resource_pool import INNER_ROLES, TRAINER_ROLES, ResourcePoolManager, Role
from gspo.distributed.run_layout import num_rollout_workers
from gspo.rollout.workers.worker import RolloutWorker

TRAINER_POOL, ROLLOUT_POOL = "global_pool", "rollout_pool"


def worker_classes(mapping: Mapping[Role, Any] | None) -> tuple[Any, Any]:
    """The classes of trainer ranks and rollout workers. A class in `role_worker_mapping` without effect is refused."""
    ranks: dict[Role, Any] = {}
    rollout: Any = RolloutWorker
    for role, worker in (mapping or {}).items():
        if not isinstance(role, Role):
            raise ClusterError(f"role_worker_mapping: {role!r} is not a gspo.cluster.Role")
        if role is Role.Rollout:
            rollout = _derived(role, worker, RolloutWorker)
        elif role in TRAINER_ROLES:
            ranks[role] = _derived(role, worker, RankWorker)
        elif role not in INNER_ROLES:
            raise ClusterError(
                f"role_worker_mapping[{role}] has no effect: rewards are functions (reward_fn, "
                "custom_reward_function.path), not a role with workers; remove it"
            )
    chosen = next((ranks[role] for role in TRAINER_ROLES if role in ranks), RankWorker)
    for role, worker in {**(mapping or {}), **ranks}.items():
        if role is Role.Rollout or plain_class(worker) in (plain_class(chosen), RankWorker):
            continue
        raise ClusterError(
            f"role_worker_mapping[{role}]={plain_class(worker).__name__} has no effect: actor, critic and reference share "
            f"one process per rank, here {plain_class(chosen).__name__}; put what it does into that class, or remove it"
        )
    return chosen, rollout


def _derived(role: Role, worker: Any, base: type) -> Any:
    plain = plain_class(worker)
    if not isinstance(plain, type) or not issubclass(plain, base):
        raise ClusterError(
            f"role_worker_mapping[{role}]={worker!r}: expected gspo.cluster.{base.__name__} or a class derived from it"
        )
    return worker


def num_local_cpus(config: TrainerConfig, manager: ResourcePoolManager | None) -> int:
    """Number of logical CPUs that a local cluster needs for the run's processes."""
    pools = manager or default_pools(config, gpus=0)
    return 2 * pools.get_n_gpus() + num_rollout_workers(config)


def default_pools(config: TrainerConfig, gpus: int) -> ResourcePoolManager:
    """One pool for the trainer's ranks, and one for separate rollout workers.

    Training uses trainer.nnodes × n_gpus_per_node devices. Without n_gpus_per_node it uses all that rollout leaves.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    per_node = trainer.n_gpus_per_node
    if per_node is None:
        per_node = (gpus - num_rollout_workers(config) * rollout.tensor_model_parallel_size) // trainer.nnodes
    spec = {TRAINER_POOL: [max(1, per_node)] * trainer.nnodes}
    mapping: dict[Role, str] = dict.fromkeys((Role.ActorRolloutRef, *INNER_ROLES), TRAINER_POOL)
    return with_rollout_pool(ResourcePoolManager(spec, mapping), config)


def with_rollout_pool(manager: ResourcePoolManager, config: TrainerConfig) -> ResourcePoolManager:
    """The same pools, with one for separate rollout workers if the mapping has none."""
    if Role.Rollout in manager.mapping or not num_rollout_workers(config):
        return manager
    spec = {**manager.resource_pool_spec, ROLLOUT_POOL: [1] * num_rollout_workers(config)}
    return ResourcePoolManager(spec, {**manager.mapping, Role.Rollout: ROLLOUT_POOL})


def trainer_role(manager: ResourcePoolManager) -> Role:
    """The role that the mapping uses for the trainer's ranks."""
    for role in TRAINER_ROLES:
        if role in manager.mapping:
            pool = manager.mapping[role]
            for inner in INNER_ROLES:
                if manager.mapping.get(inner, pool) != pool:
                    warnings.warn(
                        f"mapping[{inner}]={manager.mapping[inner]!r} has no effect: it runs in the trainer's ranks "
                        f"in pool {pool!r}",
                        stacklevel=3,
                    )
            return role
    raise ClusterError(
        f"resource_pool_manager.mapping names no pool for the trainer's ranks: add one of "
        f"{', '.join(map(str, TRAINER_ROLES))}"
    )


def make_pools(config: TrainerConfig, manager: ResourcePoolManager | None) -> ResourcePoolManager:
    """The run's pools on the connected cluster, checked against its resources."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    use_gpu = gpus > 0 if config.trainer.device == "auto" else config.trainer.device != "cpu"
    if manager is None:
        made = default_pools(config, gpus if use_gpu else 0)
    else:
        made = with_rollout_pool(dataclasses.replace(manager, resource_pool_dict={}), config)
        _warn_of_counts(config, made)
    role, rollout_pool = trainer_role(made), made.mapping.get(Role.Rollout)
    width = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if width > 1 and rollout_pool == made.mapping[role]:
        raise ClusterError(
            f"mapping[{Role.Rollout}]={rollout_pool!r} is the pool of the trainer's ranks, with one device per process, and "
            f"rollout.tensor_model_parallel_size={width}; give {Role.Rollout} a separate pool, or set it to 1"
        )
    devices = {rollout_pool: width} if rollout_pool else {}
    used = {role: made.mapping[role]} | ({Role.Rollout: rollout_pool} if rollout_pool else {})
    made = dataclasses.replace(made, mapping=used)
    made.create_resource_pool(use_gpu, devices)
    return made


def _warn_of_counts(config: TrainerConfig, manager: ResourcePoolManager) -> None:
    """Warn if the config's counts of ranks differ from the pools, which decide."""
    sizes = manager.resource_pool_spec[manager.mapping[trainer_role(manager)]]
    trainer = config.trainer
    if trainer.n_gpus_per_node is not None and sizes != [trainer.n_gpus_per_node or 1] * trainer.nnodes:
        warnings.warn(
            f"trainer.nnodes={trainer.nnodes} and trainer.n_gpus_per_node={trainer.n_gpus_per_node} have no effect: "
            f"resource_pool_manager gives the trainer's ranks {sizes}",
            stacklevel=3,
        )
