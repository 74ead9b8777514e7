"""Names that other systems use for our keys: one table of the name, the system and our key."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from gspo.config.compat import alias_values as values

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
FILTER = "algorithm.filter_groups"
STANDALONE = "standalone scripts"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"

Convert = Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Alias:
    """Another system's name for our key `target`.

    `convert` turns the value into several keys or another value. `deferred` explains an alias whose meaning depends on
    the final values of other keys; `gspo.config.loading.derive` applies it.
    """

    name: str
    system: str
    target: str
    convert: Convert | None = None
    deferred: str = ""
    is_switch: bool = False  # as a flag it needs no value

    @property
    def doc(self) -> str:
        """How the alias's value differs from the key's; empty when it does not."""
        return self.deferred or (self.convert and self.convert.__doc__) or ""

    def apply(self, value: Any) -> Mapping[str, Any]:
        """Our keys and values for a value of this alias. ValueError says what was expected."""
        return self.convert(value) if self.convert else {self.target: value}


_STANDALONE = (
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
)

_SCRIPT = (
    Alias("n_resp_per_prompt", "verl scripts", f"{ROLLOUT}.n"),
    Alias("rollout_mode", "verl scripts", f"{ROLLOUT}.mode"),
    Alias("rollout_engine", "verl scripts", f"{ROLLOUT}.name"),
    Alias("loss_mode", "verl scripts", f"{ACTOR}.policy_loss.loss_mode"),
    Alias("temperature", "verl scripts, TRL, AReaL", f"{ROLLOUT}.temperature"),
    Alias("top_p", "verl scripts, TRL, AReaL", f"{ROLLOUT}.top_p"),
    Alias("top_k", "verl scripts, TRL, AReaL", f"{ROLLOUT}.top_k"),
)

_VERL = (
    Alias(f"{ACTOR}.optim.warmup_style", "verl", f"{ACTOR}.optim.lr_scheduler_type"),
    Alias("critic.optim.warmup_style", "verl", "critic.optim.lr_scheduler_type"),
    Alias("trainer.max_checkpoints_to_keep", "verl", "trainer.max_actor_ckpt_to_keep"),
    Alias("trainer.resume_from_path", "verl", "trainer.resume_mode"),
    Alias("data.reward_fn_key", "verl", "data.data_source_key"),
    Alias("data.answer_key", "verl", "data.ground_truth_key"),
    Alias("data.dataset", "verl", "data.train_files"),
    Alias("data.train_max_samples", "verl", "data.num_train_samples"),
    Alias("data.val_max_samples", "verl", "data.num_val_samples"),
    Alias("data.trust_remote_code", "verl", f"{MODEL}.trust_remote_code"),
    Alias(f"{ACTOR}.ppo_micro_batch_size", "verl", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    Alias("reward.custom_reward_function.path", "verl", "custom_reward_function.path"),
    Alias("reward.custom_reward_function.name", "verl", "custom_reward_function.name"),
    Alias("reward.custom_reward_function.reward_kwargs", "verl", "custom_reward_function.reward_kwargs"),
    Alias("reward.reward_manager", "verl", "reward_model.reward_manager"),
    Alias("reward.reward_manager.name", "verl", "reward_model.reward_manager"),
    Alias("reward.reward_model.enable", "verl", "reward_model.enable"),
    Alias("reward.reward_kwargs.max_resp_len", "verl", "reward_model.reward_kwargs.max_resp_len"),
    Alias("reward.reward_kwargs.overlong_buffer_cfg.enable", "verl", f"{OVERLONG}.enable"),
    Alias("reward.reward_kwargs.overlong_buffer_cfg.len", "verl", f"{OVERLONG}.len"),
    Alias("reward.reward_kwargs.overlong_buffer_cfg.penalty_factor", "verl", f"{OVERLONG}.penalty_factor"),
    Alias("reward.reward_kwargs.overlong_buffer_cfg.log", "verl", f"{OVERLONG}.log"),
    Alias("reward_model.overlong_buffer.enable", "verl (DAPO)", f"{OVERLONG}.enable"),
    Alias("reward_model.overlong_buffer.len", "verl (DAPO)", f"{OVERLONG}.len"),
    Alias("reward_model.overlong_buffer.penalty_factor", "verl (DAPO)", f"{OVERLONG}.penalty_factor"),
    Alias("reward_model.overlong_buffer.log", "verl (DAPO)", f"{OVERLONG}.log"),
    Alias("reward_model.num_workers", "verl", "reward.num_workers"),
)

# Keys of AReaL's `actor` section, which may also be written at the top.
_AREAL_ACTOR = (
    Alias("importance_sampling_level", "AReaL", f"{ACTOR}.importance_sampling_level"),
    Alias("group_size", "AReaL", f"{ROLLOUT}.n"),
    Alias("dynamic_sampling", "AReaL", f"{FILTER}.enable"),
    Alias("use_decoupled_loss", "AReaL", f"{ACTOR}.use_decoupled_loss"),
    Alias("behav_imp_weight_cap", "AReaL", f"{ACTOR}.behav_imp_weight_cap"),
    Alias("behav_imp_weight_mode", "AReaL", f"{ACTOR}.behav_imp_weight_mode"),
    Alias("eps_clip", "AReaL", f"{ACTOR}.clip_ratio"),
    Alias("eps_clip_higher", "AReaL", f"{ACTOR}.clip_ratio_high"),
    Alias("c_clip", "AReaL", f"{ACTOR}.clip_ratio_c"),
    Alias("kl_ctl", "AReaL", "algorithm.kl_ctrl.kl_coef", values.kl_in_reward),
    Alias("discount", "AReaL", "algorithm.gamma"),
    Alias("gae_lambda", "AReaL", "algorithm.lam"),
    Alias("ppo_n_minibatches", "AReaL", f"{ACTOR}.ppo_mini_batch_size", deferred="Mini-batches per rollout batch."),
    Alias("recompute_logprob", "AReaL", f"{ACTOR}.old_log_prob_source", values.old_log_probs),
    Alias("entropy_coeff", "AReaL", f"{ACTOR}.entropy_coeff"),
    Alias("overlong_reward_penalty", "AReaL", f"{OVERLONG}.enable"),
    Alias("overlong_tokens", "AReaL", f"{OVERLONG}.len"),
    Alias("overlong_penalty_factor", "AReaL", f"{OVERLONG}.penalty_factor"),
)

_AREAL = (
    *(alias for alias in _AREAL_ACTOR if alias.name != "group_size"),
    *(replace(alias, name=f"actor.{alias.name}") for alias in _AREAL_ACTOR),
    Alias("actor.path", "AReaL", f"{MODEL}.path"),
    Alias("actor.dtype", "AReaL", f"{MODEL}.dtype"),
    Alias("actor.gradient_checkpointing", "AReaL", f"{MODEL}.enable_gradient_checkpointing"),
    Alias("actor.temperature", "AReaL", f"{ROLLOUT}.temperature"),
    Alias("actor.optimizer.lr", "AReaL", f"{ACTOR}.optim.lr"),
    Alias("actor.optimizer.weight_decay", "AReaL", f"{ACTOR}.optim.weight_decay"),
    Alias("actor.optimizer.eps", "AReaL", f"{ACTOR}.optim.eps"),
    Alias("actor.optimizer.gradient_clipping", "AReaL", f"{ACTOR}.grad_clip"),
    Alias("actor.optimizer.lr_scheduler_type", "AReaL", f"{ACTOR}.optim.lr_scheduler_type"),
    Alias("actor.optimizer.warmup_steps_proportion", "AReaL", f"{ACTOR}.optim.lr_warmup_steps_ratio"),
    Alias("actor.optimizer.min_lr_ratio", "AReaL", f"{ACTOR}.optim.min_lr_ratio"),
    Alias("actor.mb_spec.max_tokens_per_mb", "AReaL", f"{ACTOR}.ppo_max_token_len_per_gpu"),
    Alias("ref.path", "AReaL", "actor_rollout_ref.ref.path"),
    Alias("max_head_offpolicyness", "AReaL", f"{ROLLOUT}.max_head_offpolicyness", values.off_policyness),
    Alias("rollout.max_head_offpolicyness", "AReaL", f"{ROLLOUT}.max_head_offpolicyness", values.off_policyness),
    Alias("rollout.max_concurrent_rollouts", "AReaL", f"{ROLLOUT}.max_concurrent_rollouts"),
    Alias("gconfig.n_samples", "AReaL", f"{ROLLOUT}.n"),
    Alias("gconfig.max_new_tokens", "AReaL", "data.max_response_length"),
    Alias("gconfig.temperature", "AReaL", f"{ROLLOUT}.temperature"),
    Alias("gconfig.top_p", "AReaL", f"{ROLLOUT}.top_p"),
    Alias("gconfig.top_k", "AReaL", f"{ROLLOUT}.top_k"),
    Alias("gconfig.greedy", "AReaL", f"{ROLLOUT}.temperature", values.never_greedy),
    Alias("train_dataset.path", "AReaL", "data.train_files"),
    Alias("train_dataset.batch_size", "AReaL", "data.train_batch_size"),
    Alias("train_dataset.shuffle", "AReaL", "data.shuffle"),
    Alias("train_dataset.max_length", "AReaL", "data.max_prompt_length"),
    Alias("valid_dataset.path", "AReaL", "data.val_files"),
    Alias("valid_dataset.batch_size", "AReaL", "data.val_batch_size"),
    Alias("experiment_name", "AReaL, verl", "trainer.experiment_name"),
    Alias("total_train_epochs", "AReaL", "trainer.total_epochs"),
    Alias("total_train_steps", "AReaL", "trainer.total_training_steps"),
    Alias("tokenizer_path", "AReaL", f"{MODEL}.tokenizer_path"),
    Alias("saver.freq_steps", "AReaL", "trainer.save_freq", values.save_freq),
    Alias("evaluator.freq_steps", "AReaL", "trainer.test_freq", values.test_freq),
    Alias("recover.mode", "AReaL", "trainer.resume_mode", values.resume_mode),
    Alias("cluster.n_nodes", "AReaL", "trainer.nnodes"),
    Alias("cluster.n_gpus_per_node", "AReaL", "trainer.n_gpus_per_node"),
    Alias("cluster.fileroot", "AReaL", "trainer.default_local_dir"),
)

_TRL = (
    Alias("epsilon", "TRL", f"{ACTOR}.clip_ratio"),
    Alias("epsilon_high", "TRL", f"{ACTOR}.clip_ratio_high"),
    Alias("delta", "TRL", f"{ACTOR}.clip_ratio_c"),
    Alias("num_generations", "TRL", f"{ROLLOUT}.n"),
    Alias("loss_type", "TRL", f"{ACTOR}.loss_agg_mode", values.trl_loss_type),
    Alias("beta", "TRL", f"{ACTOR}.kl_loss_coef", values.kl_in_loss),
    Alias("scale_rewards", "TRL", "algorithm.norm_adv_by_std_in_grpo", values.trl_scale_rewards),
    Alias("num_iterations", "TRL", f"{ACTOR}.ppo_epochs"),
    Alias(
        "steps_per_generation",
        "TRL",
        f"{ACTOR}.ppo_mini_batch_size",
        deferred="Forward passes per rollout batch. Divided by gradient_accumulation_steps it is the number of mini-batches.",
    ),
    Alias(
        "gradient_accumulation_steps",
        "TRL",
        f"{ACTOR}.ppo_mini_batch_size",
        deferred="Forward passes per optimiser step.",
    ),
    Alias(
        "per_device_train_batch_size",
        "TRL",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        deferred="Responses per forward pass. Times gradient_accumulation_steps it is the mini-batch.",
    ),
    Alias("generation_batch_size", "TRL", "data.train_batch_size", deferred="Responses per rollout batch."),
    Alias("max_completion_length", "TRL", "data.max_response_length"),
    Alias("max_prompt_length", "TRL", "data.max_prompt_length"),
    Alias("num_train_epochs", "TRL", "trainer.total_epochs"),
    Alias("max_steps", "TRL", "trainer.total_training_steps"),
    Alias("max_grad_norm", "TRL", f"{ACTOR}.grad_clip"),
    Alias("lr_scheduler_type", "TRL", f"{ACTOR}.optim.lr_scheduler_type"),
    Alias("warmup_ratio", "TRL", f"{ACTOR}.optim.lr_warmup_steps_ratio"),
    Alias("warmup_steps", "TRL", f"{ACTOR}.optim.lr_warmup_steps"),
    Alias("weight_decay", "TRL", f"{ACTOR}.optim.weight_decay"),
    Alias("gradient_checkpointing", "TRL", f"{MODEL}.enable_gradient_checkpointing"),
    Alias("bf16", "TRL", f"{MODEL}.dtype", values.bf16_dtype, is_switch=True),
    Alias("use_vllm", "TRL", f"{ROLLOUT}.name", values.vllm_engine, is_switch=True),
    Alias("vllm_gpu_memory_utilization", "TRL", f"{ROLLOUT}.gpu_memory_utilization"),
    Alias("vllm_tensor_parallel_size", "TRL", f"{ROLLOUT}.tensor_model_parallel_size"),
    Alias("report_to", "TRL", "trainer.logger", values.loggers),
    Alias("run_name", "TRL", "trainer.experiment_name"),
    Alias("save_steps", "TRL", "trainer.save_freq"),
    Alias("save_total_limit", "TRL", "trainer.max_actor_ckpt_to_keep"),
    Alias("eval_steps", "TRL", "trainer.test_freq"),
    Alias("model_name_or_path", "TRL", f"{MODEL}.path"),
    Alias("dataset_name", "TRL", "data.train_files"),
    Alias("lora_r", "TRL", f"{MODEL}.lora_rank"),
    Alias("lora_target_modules", "TRL", f"{MODEL}.target_modules"),
)


@cache
def aliases() -> dict[str, Alias]:
    """Every alias by name."""
    table: dict[str, Alias] = {}
    for alias in (*_STANDALONE, *_SCRIPT, *_VERL, *_AREAL, *_TRL):
        assert alias.name not in table, f"alias {alias.name} is defined twice"
        table[alias.name] = alias
    return table


def aliases_of(key: str) -> list[Alias]:
    """The aliases of a key."""
    return [a for a in aliases().values() if a.target == key]
