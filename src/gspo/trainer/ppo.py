"""verl's trainer class, in process: `PPOTrainerWithSampling` takes the arguments of `RayPPOTrainerWithSampling`.

`RayPPOTrainerWithSampling` is the cluster's class where `gspo.cluster` is there; otherwise the same name gives the
in-process trainer, with a warning, so that a script written for a cluster runs on one machine.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from gspo.config import ResolvedConfig, TrainerConfig

if TYPE_CHECKING:
    from gspo.loop.trainer import Trainer

__all__ = ["PPOTrainerWithSampling"]


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


def __getattr__(name: str) -> Any:
    if name != "RayPPOTrainerWithSampling":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("gspo.cluster") is not None and find_spec("ray") is not None:
        return importlib.import_module("gspo.cluster").RayPPOTrainerWithSampling
    warnings.warn(
        "RayPPOTrainerWithSampling needs Ray and gspo.cluster, which are not installed; "
        "PPOTrainerWithSampling, which trains in this process, is used in its place",
        stacklevel=2,
    )
    return PPOTrainerWithSampling
