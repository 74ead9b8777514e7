"""Which processes a run has on a cluster: the pools of its roles and the classes that play them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

from gspo.config import TrainerConfig
from gspo.distributed.rank_worker import RankWorker
from gspo.distributed.ray.actors import plain_class
from gspo.distributed.ray.errors import ClusterError
from gspo.distributed.ray.resource_pool import ResourcePoolManager
from gspo.distributed.ray.role import INNER_ROLES, TRAINER_ROLES, Role
from gspo.distributed.run_layout import num_rollout_workers
from gspo.rollout.workers.worker import RolloutWorker

TRAINER_POOL, ROLLOUT_POOL = "global_pool", "rollout_pool"


@dataclass(frozen=True, slots=True)
class WorkerClasses:
    """The classes of the processes: trainer ranks and rollout workers."""

    rank: Any = RankWorker
    rollout: Any = RolloutWorker


def worker_classes(mapping: Mapping[Role, Any] | None) -> WorkerClasses:
    """The classes a `role_worker_mapping` asks for. A class that could not act is refused by its role's name."""
    ranks: dict[Role, Any] = {}
    rollout: Any = RolloutWorker
    for role, worker in (mapping or {}).items():
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
            f"one process a rank, here {plain_class(chosen).__name__}; put what it does into that class, or remove it"
        )
    return WorkerClasses(chosen, rollout)


def _derived(role: Role, worker: Any, base: type) -> Any:
    plain = plain_class(worker)
    if not isinstance(plain, type) or not issubclass(plain, base):
        raise ClusterError(
            f"role_worker_mapping[{role}]={worker!r}: expected gspo.cluster.{base.__name__} or a class derived from it"
        )
    return worker


def num_local_cpus(config: TrainerConfig, manager: ResourcePoolManager | None) -> int:
    """CPUs that a local cluster must count for the run's processes to have a place."""
    pools = manager or default_pools(config, gpus=0)
    return 2 * pools.get_n_gpus() + num_rollout_workers(config)


def default_pools(config: TrainerConfig, gpus: int) -> ResourcePoolManager:
    """One pool for the trainer's ranks, and one for rollout workers when the config has them.

    Training uses trainer.nnodes × n_gpus_per_node devices; when the second is not set, all that rollout workers leave.
    """
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    apart = num_rollout_workers(config)
    per_node = trainer.n_gpus_per_node
    if per_node is None:
        per_node = (gpus - apart * rollout.tensor_model_parallel_size) // trainer.nnodes
    spec = {TRAINER_POOL: [max(1, per_node)] * trainer.nnodes}
    mapping: dict[Role, str] = dict.fromkeys((Role.ActorRolloutRef, *INNER_ROLES), TRAINER_POOL)
    return with_rollout_pool(ResourcePoolManager(spec, mapping), config)


def with_rollout_pool(manager: ResourcePoolManager, config: TrainerConfig) -> ResourcePoolManager:
    """The same pools, with one for rollout workers where the config has them and the mapping does not."""
    if Role.Rollout in manager.mapping or not num_rollout_workers(config):
        return manager
    apart = [1] * num_rollout_workers(config)
    return ResourcePoolManager(
        {**manager.resource_pool_spec, ROLLOUT_POOL: apart}, {**manager.mapping, Role.Rollout: ROLLOUT_POOL}
    )


def trainer_role(manager: ResourcePoolManager) -> Role:
    """The role under which the mapping names the trainer's ranks."""
    for role in TRAINER_ROLES:
        if role in manager.mapping:
            pool = manager.mapping[role]
            for inner in INNER_ROLES:
                if manager.mapping.get(inner, pool) != pool:
                    warnings.warn(
                        f"mapping[{inner}]={manager.mapping[inner]!r} has no effect: it is played by the trainer's ranks "
                        f"in pool {pool!r}",
                        stacklevel=3,
                    )
            return role
    raise ClusterError(
        f"resource_pool_manager.mapping names no pool for the trainer's ranks: add one of "
        f"{', '.join(map(str, TRAINER_ROLES))}"
    )


def make_pools(config: TrainerConfig, manager: ResourcePoolManager | None) -> ResourcePoolManager:
    """The run's pools on the connected cluster, checked against what it has."""
    gpus = int(ray.cluster_resources().get("GPU", 0))
    use_gpu = gpus > 0 if config.trainer.device == "auto" else config.trainer.device != "cpu"
    if manager is None:
        made = default_pools(config, gpus if use_gpu else 0)
    else:
        made = with_rollout_pool(dataclasses.replace(manager, resource_pool_dict={}), config)
        _compare(config, made)
    role, apart = trainer_role(made), made.mapping.get(Role.Rollout)
    width = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if width > 1 and apart == made.mapping[role]:
        raise ClusterError(
            f"mapping[{Role.Rollout}]={apart!r} is the pool of the trainer's ranks, of one device a process, and "
            f"rollout.tensor_model_parallel_size={width}; give {Role.Rollout} a pool of its own, or set it to 1"
        )
    devices = {apart: width} if apart else {}
    used = {role: made.mapping[role]} | ({Role.Rollout: apart} if apart else {})
    made = dataclasses.replace(made, mapping=used)
    made.create_resource_pool(use_gpu, devices)
    return made


def _compare(config: TrainerConfig, manager: ResourcePoolManager) -> None:
    """Say that the pools decide where the config's counts differ from them."""
    sizes = manager.resource_pool_spec[manager.mapping[trainer_role(manager)]]
    trainer = config.trainer
    asked = [trainer.n_gpus_per_node or 1] * trainer.nnodes
    if trainer.n_gpus_per_node is not None and sizes != asked:
        warnings.warn(
            f"trainer.nnodes={trainer.nnodes} and trainer.n_gpus_per_node={trainer.n_gpus_per_node} have no effect: "
            f"resource_pool_manager gives the trainer's ranks {sizes}",
            stacklevel=3,
        )
