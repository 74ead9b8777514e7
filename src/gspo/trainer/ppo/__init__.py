"""verl's trainers: `RayPPOTrainerWithSampling` and `RayPPOTrainer` on a cluster, `PPOTrainerWithSampling` in process.

Without Ray the first two are the third, with a warning, so that a script for a cluster runs on one machine.
"""

from __future__ import annotations

import importlib
import warnings
from importlib.util import find_spec
from typing import Any

from gspo.compat.verl_trainer import PPOTrainerWithSampling

__all__ = ["PPOTrainerWithSampling"]


def __getattr__(name: str) -> Any:
    if name not in ("RayPPOTrainerWithSampling", "RayPPOTrainer"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if find_spec("ray") is not None:
        return getattr(importlib.import_module("gspo.cluster"), name)
    warnings.warn(
        f"{name} needs Ray, which is not installed (pip install 'gspo[ray]'); "
        "PPOTrainerWithSampling, which trains in this process, is used instead",
        stacklevel=2,
    )
    return PPOTrainerWithSampling
