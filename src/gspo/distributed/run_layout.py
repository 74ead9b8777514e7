"""Which rollout workers a run has, and how they compute."""

from __future__ import annotations

import torch

from gspo.config import TrainerConfig
from gspo.models.load import compute_dtype


def num_rollout_workers(config: TrainerConfig) -> int:
    """Rollout workers in processes of their own that the config asks for; 0: the trainer's process generates."""
    rollout = config.actor_rollout_ref.rollout
    # Only the native engine runs inside the trainer: others change much of the process they run in.
    apart = rollout.mode == "async" or rollout.num_workers > 1 or rollout.name != "native"
    return rollout.num_workers if apart else 0


def rollout_dtype(config: TrainerConfig, device: torch.device) -> str:
    """The precision in which a rollout worker on `device` computes: the trainer's unless the config says another."""
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    return compute_dtype(model.dtype, device) if rollout.dtype == "auto" else rollout.dtype


def runs_ahead(config: TrainerConfig) -> bool:
    """Whether rollouts are generated while the trainer trains. A budget of 0 versions leaves nothing to run ahead."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.mode == "async" and rollout.max_head_offpolicyness > 0
