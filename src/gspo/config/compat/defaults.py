"""Defaults of other systems that differ from ours in what is trained: they hold where a system's own door is used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ACTOR = "actor_rollout_ref.actor"

_VERL = {f"{ACTOR}.policy_loss.loss_mode": "vanilla"}

_TRL = {
    f"{ACTOR}.policy_loss.loss_mode": "vanilla",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": None,
    f"{ACTOR}.clip_ratio_high": None,
    f"{ACTOR}.clip_ratio_c": None,
    f"{ACTOR}.clip_target": None,
    f"{ACTOR}.use_kl_loss": False,
    f"{ACTOR}.kl_loss_type": "k3",
    f"{ACTOR}.ppo_mini_batch_size": 1,
    f"{ACTOR}.optim.lr": 1e-6,
    f"{ACTOR}.optim.lr_warmup_steps": 0,
    f"{ACTOR}.optim.lr_scheduler_type": "linear",
    f"{ACTOR}.optim.min_lr_ratio": 0.0,
    f"{ACTOR}.optim.weight_decay": 0.0,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.rollout.n": 8,
    "algorithm.filter_groups.enable": False,
    "data.train_batch_size": 1,
    "data.gen_batch_size": None,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "data.ground_truth_key": "",
    "trainer.total_epochs": 3,
    "trainer.total_training_steps": None,
    "trainer.default_local_dir": "trainer_output",
    "trainer.save_freq": 500,
    "trainer.max_actor_ckpt_to_keep": None,
    "trainer.test_freq": -1,
    "trainer.val_before_train": False,
    "trainer.val_after_train": False,
    "trainer.seed": 42,
}

# System → our key → its value there. "verl" is its program, which also chooses the devices; "verl's classes" does not.
SYSTEM_DEFAULTS: Mapping[str, Mapping[str, Any]] = {"verl": _VERL, "verl's classes": _VERL, "TRL": _TRL, "AReaL": _VERL}
