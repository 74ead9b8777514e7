"""How many rollout workers a run has, their precision, and whether they run ahead of training."""

from __future__ import annotations

import torch

from gspo.config import TrainerConfig
from gspo.models.load import compute_dtype


def num_rollout_workers(config: TrainerConfig) -> int:
    """Number of separate rollout worker processes; 0 when the trainer's process generates."""
    rollout = config.actor_rollout_ref.rollout
    # Only the native engine runs inside the trainer: others change global state of their process.
    separate = rollout.mode == "async" or rollout.num_workers > 1 or rollout.name != "native"
    return rollout.num_workers if separate else 0


def rollout_dtype(config: TrainerConfig, device: torch.device) -> str:
    """The precision of a rollout worker on `device`: `rollout.dtype`, or the trainer's when that is auto."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    return compute_dtype(model.dtype, device) if rollout.dtype == "auto" else rollout.dtype


def runs_ahead(config: TrainerConfig) -> bool:
    """Whether rollouts are generated while the trainer trains: async mode with a staleness budget above 0."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.mode == "async" and rollout.max_head_offpolicyness > 0
