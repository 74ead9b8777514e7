"""Names of standalone training scripts and of the variables of verl's shell scripts."""

from __future__ import annotations

from gspo.config.compat import alias_values as values
from gspo.config.compat.alias import Alias

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
STANDALONE = "standalone scripts"

ALIASES = (
    Alias("dataset", STANDALONE, "data.train_files"),
    Alias("num_train_samples", STANDALONE, "data.num_train_samples"),
    Alias("num_epochs", STANDALONE, "trainer.total_epochs"),
    Alias("model_name", STANDALONE, f"{MODEL}.path"),
    Alias("group_size", f"{STANDALONE}, AReaL", f"{ROLLOUT}.n"),
    Alias("left_clip_range", STANDALONE, f"{ACTOR}.clip_ratio_low"),
    Alias("right_clip_range", STANDALONE, f"{ACTOR}.clip_ratio_high"),
    Alias("learning_rate", f"{STANDALONE}, TRL", f"{ACTOR}.optim.lr"),
    Alias(
        "update_frequency",
        STANDALONE,
        f"{ACTOR}.ppo_mini_batch_size",
        deferred="The old policy is renewed every k optimiser steps, so a rollout batch has k mini-batches.",
    ),
    Alias("batch_size", STANDALONE, "data.train_batch_size"),
    Alias("mini_batch_size", STANDALONE, f"{ACTOR}.ppo_mini_batch_size"),
    Alias("max_length", STANDALONE, "data.max_response_length"),
    Alias("use_wandb", STANDALONE, "trainer.logger", values.wandb_logger, is_switch=True),
    Alias("seed", f"{STANDALONE}, AReaL, TRL", "trainer.seed"),
    Alias("output_dir", f"{STANDALONE}, TRL", "trainer.default_local_dir"),
    Alias("n_resp_per_prompt", "verl scripts", f"{ROLLOUT}.n"),
    Alias("rollout_mode", "verl scripts", f"{ROLLOUT}.mode"),
    Alias("rollout_engine", "verl scripts", f"{ROLLOUT}.name"),
    Alias("loss_mode", "verl scripts", f"{ACTOR}.policy_loss.loss_mode"),
    Alias("temperature", "verl scripts, TRL, AReaL", f"{ROLLOUT}.temperature"),
    Alias("top_p", "verl scripts, TRL, AReaL", f"{ROLLOUT}.top_p"),
    Alias("top_k", "verl scripts, TRL, AReaL", f"{ROLLOUT}.top_k"),
)
