"""verl's trainer class in this process: `PPOTrainerWithSampling`, with the arguments of `RayPPOTrainerWithSampling`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from gspo.config import ResolvedConfig, TrainerConfig, load

if TYPE_CHECKING:
    from gspo.distributed.backend import Backend
    from gspo.loop.trainer import Trainer

AnyConfig = TrainerConfig | ResolvedConfig | Mapping[str, Any]

# Arguments of verl's class that have no effect, and what decides instead.
WITHOUT_EFFECT = {
    "processor": "prompts are text; the tokenizer's chat template is applied (data.apply_chat_template_kwargs)",
    "collate_fn": "rows are read by data.prompt_key, data.ground_truth_key and data.data_source_key",
    "train_sampler": "the order of the rows is decided by data.shuffle and data.seed, so that a run can resume exactly",
}


class PPOTrainerWithSampling:
    """Trains in this process, with dynamic sampling when `algorithm.filter_groups.enable` is set.

    `role_worker_mapping`, `resource_pool_manager` and `ray_worker_group_cls` describe workers of a cluster: they are
    ignored with a warning. `config` is a TrainerConfig, the result of `gspo.config.load`, or a mapping of verl's keys.
    What it does not set has verl's default: the loss is vanilla (PPO and GRPO), GSPO is loss_mode gspo. Nothing is
    loaded before `init_workers` or `fit`.
    """

    _overrides: tuple[str, ...] = ()  # settings of this class

    def __init__(
        self,
        config: AnyConfig,
        tokenizer: Any = None,
        role_worker_mapping: Any = None,
        resource_pool_manager: Any = None,
        ray_worker_group_cls: Any = None,
        processor: Any = None,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        train_dataset: Iterable[Any] | None = None,
        val_dataset: Iterable[Any] | None = None,
        collate_fn: Any = None,
        train_sampler: Any = None,
        device_name: str | None = None,
    ) -> None:
        unused = {"processor": processor, "collate_fn": collate_fn, "train_sampler": train_sampler}
        for name, value in unused.items():
            if value is not None:
                warnings.warn(f"{name} has no effect: {WITHOUT_EFFECT[name]}", stacklevel=2)
        overrides = [*self._overrides, *([] if device_name is None else [f"trainer.device={device_name}"])]
        self.config = resolve_as_verl(config, overrides)
        self._backend = self._place(role_worker_mapping, resource_pool_manager, ray_worker_group_cls)
        self._arguments = {
            "tokenizer": tokenizer,
            "reward_fn": reward_fn,
            "val_reward_fn": val_reward_fn,
            "train_dataset": train_dataset,
            "val_dataset": val_dataset,
        }
        self._trainer: Trainer | None = None

    def _place(self, roles: Any, pools: Any, group_class: Any) -> Backend | None:
        """The backend of the run's processes; None for this process."""
        unused = {"role_worker_mapping": roles, "resource_pool_manager": pools, "ray_worker_group_cls": group_class}
        for name, value in unused.items():
            if value:
                message = f"{name} has no effect: {type(self).__name__} trains in this process"
                warnings.warn(message, stacklevel=3)
        return None

    def build(self) -> Trainer:
        """A Trainer ready to `fit`: the config is checked, data and models are loaded."""
        from gspo.loop.trainer import Trainer

        return Trainer(self.config, backend=self._backend, **self._arguments)

    def init_workers(self) -> None:
        """Build the trainer. `fit` does so if this was not called."""
        self._trainer = self._trainer or self.build()

    def fit(self) -> dict[str, Any]:
        """Train to the end and close the trainer. Returns the result that `gspo train` prints."""
        self.init_workers()
        assert self._trainer is not None
        trainer, self._trainer = self._trainer, None
        return trainer.fit()

    def close(self) -> None:
        """Close a trainer that `init_workers` built and `fit` has not used. May be called twice."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()


def resolve_as_verl(config: AnyConfig, overrides: Sequence[str] = ()) -> ResolvedConfig:
    """A config of any kind with these overrides, checked. What it does not set has verl's default."""
    if isinstance(config, DictConfig):
        config = OmegaConf.to_container(config, resolve=True)  # pyright: ignore[reportAssignmentType]
    return load(base=config, overrides=overrides, system="verl's classes")
