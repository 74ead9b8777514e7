"""verl's trainer class, in process: `PPOTrainerWithSampling` takes the arguments of `RayPPOTrainerWithSampling`."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from gspo.config import ResolvedConfig, TrainerConfig

if TYPE_CHECKING:
    from gspo.loop.trainer import Trainer


class PPOTrainerWithSampling:
    """Trains as `config` says, with dynamic sampling when `algorithm.filter_groups.enable` is set.

    Roles are placed by the config alone: `role_worker_mapping` and `resource_pool_manager` name workers of a cluster
    and must be None, or are passed over with a warning. Nothing is loaded before `fit`.
    """

    def __init__(
        self,
        config: TrainerConfig | ResolvedConfig,
        tokenizer: Any = None,
        role_worker_mapping: Any = None,
        resource_pool_manager: Any = None,
        *,
        reward_fn: Any = None,
        val_reward_fn: Any = None,
        train_dataset: Iterable[Any] | None = None,
        val_dataset: Iterable[Any] | None = None,
    ) -> None:
        placed = {"role_worker_mapping": role_worker_mapping, "resource_pool_manager": resource_pool_manager}
        for name, value in placed.items():
            if value:
                warnings.warn(
                    f"{name} has no effect: {type(self).__name__} trains in this process", stacklevel=2
                )
        self.config = config
        self._given = {
            "tokenizer": tokenizer,
            "reward_fn": reward_fn,
            "val_reward_fn": val_reward_fn,
            "train_dataset": train_dataset,
            "val_dataset": val_dataset,
        }

    def build(self) -> Trainer:
        """The loop itself, ready to `fit`: config checked, data read, model loaded."""
        from gspo.loop.trainer import Trainer

        return Trainer(self.config, **self._given)

    def fit(self) -> dict[str, Any]:
        """Train to the end; the result that `gspo train` prints."""
        return self.build().fit()
