"""verl's trainer class on Ray: the same loop as everywhere, with its ranks and rollout workers as actors."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from gspo.cluster.backend import RayBackend
from gspo.cluster.errors import ClusterError
from gspo.cluster.ray_team import RayTeam
from gspo.cluster.resource_pool_manager import ResourcePoolManager
from gspo.cluster.role import Role
from gspo.config import ResolvedConfig, TrainerConfig, load

if TYPE_CHECKING:
    from gspo.loop.trainer import Trainer

# Arguments of verl's class that nothing here can obey, and what decides instead.
WITHOUT_EFFECT = {
    "processor": "prompts are text; the tokenizer's chat template is applied (data.apply_chat_template_kwargs)",
    "collate_fn": "rows are read by data.prompt_key, data.ground_truth_key and data.data_source_key",
    "train_sampler": "the order of the rows is decided by data.shuffle and data.seed, so that a run can resume exactly",
}


class RayPPOTrainerWithSampling:
    """Trains as `config` says on a Ray cluster, with dynamic sampling when `algorithm.filter_groups.enable` is set.

    The cluster is the one this process is connected to, else that of RAY_ADDRESS, else a local one for this run.
    `role_worker_mapping` and `resource_pool_manager` may be None or empty: then trainer.nnodes × n_gpus_per_node ranks
    train, and rollout workers are placed as the rollout section says. `config` is a TrainerConfig, what
    `gspo.config.load` returns, or a mapping of verl's keys.
    """

    def __init__(
        self,
        config: TrainerConfig | ResolvedConfig | Mapping[str, Any],
        tokenizer: Any = None,
        role_worker_mapping: Mapping[Role, Any] | None = None,
        resource_pool_manager: ResourcePoolManager | None = None,
        ray_worker_group_cls: type[RayTeam] | None = None,
        processor: Any = None,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        train_dataset: Iterable[Any] | None = None,
        val_dataset: Iterable[Any] | None = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
        device_name: str | None = None,
    ) -> None:
        given = {"processor": processor, "collate_fn": collate_fn, "train_sampler": train_sampler}
        for name, value in given.items():
            if value is not None:
                warnings.warn(f"{name} has no effect: {WITHOUT_EFFECT[name]}", stacklevel=2)
        self.config = _on_ray(config, device_name)
        self._backend = RayBackend(
            _roles(role_worker_mapping), _pools(resource_pool_manager), _team_class(ray_worker_group_cls)
        )
        self._given = {
            "tokenizer": tokenizer,
            "reward_fn": reward_fn,
            "val_reward_fn": val_reward_fn,
            "train_dataset": train_dataset,
            "val_dataset": val_dataset,
        }
        self._trainer: Trainer | None = None

    def init_workers(self) -> None:
        """Check the config, read the data, place the workers and load their models. `fit` does so when it was not done."""
        if self._trainer is None:
            from gspo.loop.trainer import Trainer

            self._trainer = Trainer(self.config, backend=self._backend, **self._given)

    def fit(self) -> dict[str, Any]:
        """Train to the end and leave the cluster; the result that `gspo train` prints."""
        self.init_workers()
        assert self._trainer is not None
        trainer, self._trainer = self._trainer, None
        return trainer.fit()

    def close(self) -> None:
        """Give up workers of `init_workers` that no `fit` has used. May be called twice."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()


def _on_ray(
    config: TrainerConfig | ResolvedConfig | Mapping[str, Any], device_name: str | None
) -> ResolvedConfig:
    """The config with `trainer.backend=ray`, and the device when one is named; checked."""
    overrides = ["trainer.backend=ray"]
    if device_name is not None:
        overrides.append(f"trainer.device={device_name}")
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportAssignmentType]
    base = config.config if isinstance(config, ResolvedConfig) else config
    return load(base=base, overrides=overrides)


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


def _team_class(group_class: type[RayTeam] | None) -> type[RayTeam]:
    if group_class is None:
        return RayTeam
    if isinstance(group_class, type) and issubclass(group_class, RayTeam):
        return group_class
    raise ClusterError(
        f"ray_worker_group_cls={group_class!r}: expected gspo.cluster.RayTeam or a class derived from it, or None"
    )
