"""Names of other systems for our keys: one table, each with its source, its meaning here and a line of doc."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from gspo.config.compat import alias_values as values

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
FILTER = "algorithm.filter_groups"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"

Convert = Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Alias:
    """Another system's name. `target` is our key; `convert` gives several keys or another value.

    A `deferred` alias needs the final values of other keys: `gspo.config.loading.derive` gives it its meaning.
    """

    name: str
    system: str
    target: str
    doc: str = ""
    convert: Convert | None = None
    deferred: bool = False
    is_switch: bool = False  # as a flag it may stand alone

    def apply(self, value: Any) -> Mapping[str, Any]:
        """Our keys and values for a value under this name. ValueError says what was expected."""
        return self.convert(value) if self.convert else {self.target: value}


_STANDALONE = (
    Alias("dataset", "standalone", "data.train_files", "Built-in task, file or hub name."),
    Alias("num_train_samples", "standalone", "data.num_train_samples", "Training prompts used."),
    Alias("num_epochs", "standalone", "trainer.total_epochs", "Passes over the data."),
    Alias("model_name", "standalone", f"{MODEL}.path", "Hub name or folder."),
    Alias("group_size", "standalone, AReaL", f"{ROLLOUT}.n", "Responses a prompt."),
    Alias("left_clip_range", "standalone", f"{ACTOR}.clip_ratio_low", "ε below 1."),
    Alias("right_clip_range", "standalone", f"{ACTOR}.clip_ratio_high", "ε above 1."),
    Alias("learning_rate", "standalone, TRL", f"{ACTOR}.optim.lr", "Peak learning rate."),
    Alias(
        "update_frequency",
        "standalone",
        f"{ACTOR}.ppo_mini_batch_size",
        "k: the old policy is refreshed every k optimiser steps, so a rollout batch has k mini-batches.",
        deferred=True,
    ),
    Alias("batch_size", "standalone", "data.train_batch_size", "Prompts a training step."),
    Alias("mini_batch_size", "standalone", f"{ACTOR}.ppo_mini_batch_size", "Prompts an optimiser step."),
    Alias("max_length", "standalone", "data.max_response_length", "Longest response in tokens."),
    Alias(
        "use_wandb",
        "standalone",
        "trainer.logger",
        "Log to Weights & Biases too.",
        values.wandb_logger,
        is_switch=True,
    ),
    Alias("seed", "standalone, AReaL, TRL", "trainer.seed", "Seed of everything that is random."),
    Alias("output_dir", "standalone, TRL", "trainer.default_local_dir", "Folder that holds the run folders."),
)

_SCRIPT = (
    Alias("n_resp_per_prompt", "verl scripts", f"{ROLLOUT}.n", "Responses a prompt."),
    Alias("rollout_mode", "verl scripts", f"{ROLLOUT}.mode", "sync or async."),
    Alias("rollout_engine", "verl scripts", f"{ROLLOUT}.name", "native or vllm."),
    Alias("loss_mode", "verl scripts", f"{ACTOR}.policy_loss.loss_mode", "The policy loss."),
    Alias("temperature", "verl scripts, TRL, AReaL", f"{ROLLOUT}.temperature", "Sampling temperature."),
    Alias("top_p", "verl scripts, TRL, AReaL", f"{ROLLOUT}.top_p", "Nucleus sampling."),
    Alias("top_k", "verl scripts, TRL, AReaL", f"{ROLLOUT}.top_k", "Top-k sampling."),
)

_VERL = (
    Alias(
        f"{ACTOR}.optim.warmup_style",
        "verl",
        f"{ACTOR}.optim.lr_scheduler_type",
        "Schedule after the warm-up.",
    ),
    Alias("critic.optim.warmup_style", "verl", "critic.optim.lr_scheduler_type", "Schedule of the critic."),
    Alias(
        "trainer.max_checkpoints_to_keep",
        "verl",
        "trainer.max_actor_ckpt_to_keep",
        "Newest checkpoints kept.",
    ),
    Alias("trainer.resume_from_path", "verl", "trainer.resume_mode", "Checkpoint to go on from."),
    Alias("data.reward_fn_key", "verl", "data.data_source_key", "Column that chooses the reward function."),
    Alias("data.answer_key", "verl", "data.ground_truth_key", "Column with the right answer."),
    Alias("data.dataset", "verl", "data.train_files", "Training data."),
    Alias("data.train_max_samples", "verl", "data.num_train_samples", "Training prompts used."),
    Alias("data.val_max_samples", "verl", "data.num_val_samples", "Held-out prompts used."),
    Alias(
        "data.trust_remote_code", "verl", f"{MODEL}.trust_remote_code", "Run code that comes with the model."
    ),
    Alias(
        f"{ACTOR}.ppo_micro_batch_size",
        "verl",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        "Responses a forward.",
    ),
    Alias(
        "reward.custom_reward_function.path", "verl", "custom_reward_function.path", "File of the function."
    ),
    Alias(
        "reward.custom_reward_function.name", "verl", "custom_reward_function.name", "Name of the function."
    ),
    Alias(
        "reward.custom_reward_function.reward_kwargs",
        "verl",
        "custom_reward_function.reward_kwargs",
        "Its arguments.",
    ),
    Alias("reward.reward_manager", "verl", "reward_model.reward_manager", "The reward manager."),
    Alias("reward.reward_manager.name", "verl", "reward_model.reward_manager", "The reward manager."),
    Alias("reward.reward_model.enable", "verl", "reward_model.enable", "Score with a trained reward model."),
    Alias(
        "reward.reward_kwargs.max_resp_len",
        "verl",
        "reward_model.reward_kwargs.max_resp_len",
        "Full-penalty length.",
    ),
    *(
        Alias(
            f"reward.reward_kwargs.overlong_buffer_cfg.{name}",
            "verl",
            f"{OVERLONG}.{name}",
            "Overlong penalty.",
        )
        for name in ("enable", "len", "penalty_factor", "log")
    ),
    *(
        Alias(
            f"reward_model.overlong_buffer.{name}", "verl (DAPO)", f"{OVERLONG}.{name}", "Overlong penalty."
        )
        for name in ("enable", "len", "penalty_factor", "log")
    ),
    Alias("reward_model.num_workers", "verl", "reward.num_workers", "Reward processes."),
)

_AREAL_ACTOR = (
    (
        "importance_sampling_level",
        f"{ACTOR}.importance_sampling_level",
        "Ratio per token or sequence.",
        None,
        False,
    ),
    ("group_size", f"{ROLLOUT}.n", "Responses a prompt.", None, False),
    ("dynamic_sampling", f"{FILTER}.enable", "Leave out groups of equal rewards.", None, False),
    ("use_decoupled_loss", f"{ACTOR}.use_decoupled_loss", "Weigh the loss by π_old/μ.", None, False),
    ("behav_imp_weight_cap", f"{ACTOR}.behav_imp_weight_cap", "Cap of that weight.", None, False),
    ("behav_imp_weight_mode", f"{ACTOR}.behav_imp_weight_mode", "What the cap does.", None, False),
    ("eps_clip", f"{ACTOR}.clip_ratio", "ε of both sides.", None, False),
    ("eps_clip_higher", f"{ACTOR}.clip_ratio_high", "ε above 1.", None, False),
    ("c_clip", f"{ACTOR}.clip_ratio_c", "Dual clip.", None, False),
    (
        "kl_ctl",
        "algorithm.kl_ctrl.kl_coef",
        "KL in the reward; 0 switches it off.",
        values.kl_in_reward,
        False,
    ),
    ("discount", "algorithm.gamma", "Discount of rewards.", None, False),
    ("gae_lambda", "algorithm.lam", "GAE's lambda.", None, False),
    ("ppo_n_minibatches", f"{ACTOR}.ppo_mini_batch_size", "Mini-batches a rollout batch.", None, True),
    (
        "recompute_logprob",
        f"{ACTOR}.old_log_prob_source",
        "true = recompute π_old.",
        values.old_log_probs,
        False,
    ),
    ("entropy_coeff", f"{ACTOR}.entropy_coeff", "Entropy bonus.", None, False),
    ("overlong_reward_penalty", f"{OVERLONG}.enable", "Penalty on long responses.", None, False),
    ("overlong_tokens", f"{OVERLONG}.len", "Tokens in which it grows.", None, False),
    ("overlong_penalty_factor", f"{OVERLONG}.penalty_factor", "Penalty at the limit.", None, False),
)

_AREAL_ACTOR_ONLY = (
    Alias("actor.path", "AReaL", f"{MODEL}.path", "The model."),
    Alias("actor.dtype", "AReaL", f"{MODEL}.dtype", "Compute precision."),
    Alias(
        "actor.gradient_checkpointing",
        "AReaL",
        f"{MODEL}.enable_gradient_checkpointing",
        "Recompute activations.",
    ),
    Alias("actor.temperature", "AReaL", f"{ROLLOUT}.temperature", "Sampling temperature."),
    Alias("actor.optimizer.lr", "AReaL", f"{ACTOR}.optim.lr", "Peak learning rate."),
    Alias("actor.optimizer.weight_decay", "AReaL", f"{ACTOR}.optim.weight_decay", "Weight decay."),
    Alias("actor.optimizer.eps", "AReaL", f"{ACTOR}.optim.eps", "AdamW's epsilon."),
    Alias("actor.optimizer.gradient_clipping", "AReaL", f"{ACTOR}.grad_clip", "Largest gradient norm."),
    Alias("actor.optimizer.lr_scheduler_type", "AReaL", f"{ACTOR}.optim.lr_scheduler_type", "Schedule."),
    Alias(
        "actor.optimizer.warmup_steps_proportion",
        "AReaL",
        f"{ACTOR}.optim.lr_warmup_steps_ratio",
        "Warm-up share.",
    ),
    Alias(
        "actor.optimizer.min_lr_ratio",
        "AReaL",
        f"{ACTOR}.optim.min_lr_ratio",
        "Last learning rate over the peak.",
    ),
    Alias(
        "actor.mb_spec.max_tokens_per_mb",
        "AReaL",
        f"{ACTOR}.ppo_max_token_len_per_gpu",
        "Token budget of a forward.",
    ),
    Alias("ref.path", "AReaL", "actor_rollout_ref.ref.path", "The reference model."),
)

_AREAL = (
    *(Alias(n, "AReaL", t, d, c, deferred=later) for n, t, d, c, later in _AREAL_ACTOR if n != "group_size"),
    *(Alias(f"actor.{n}", "AReaL", t, d, c, deferred=later) for n, t, d, c, later in _AREAL_ACTOR),
    *_AREAL_ACTOR_ONLY,
    Alias(
        "max_head_offpolicyness",
        "AReaL",
        f"{ROLLOUT}.max_head_offpolicyness",
        "Versions that rollouts may run ahead; > 0 also sets mode=async.",
        values.off_policyness,
    ),
    Alias(
        "rollout.max_head_offpolicyness",
        "AReaL",
        f"{ROLLOUT}.max_head_offpolicyness",
        "Versions that rollouts may run ahead; > 0 also sets mode=async.",
        values.off_policyness,
    ),
    Alias(
        "rollout.max_concurrent_rollouts", "AReaL", f"{ROLLOUT}.max_concurrent_rollouts", "Groups in flight."
    ),
    Alias("gconfig.n_samples", "AReaL", f"{ROLLOUT}.n", "Responses a prompt."),
    Alias("gconfig.max_new_tokens", "AReaL", "data.max_response_length", "Longest response."),
    Alias("gconfig.temperature", "AReaL", f"{ROLLOUT}.temperature", "Sampling temperature."),
    Alias("gconfig.top_p", "AReaL", f"{ROLLOUT}.top_p", "Nucleus sampling."),
    Alias("gconfig.top_k", "AReaL", f"{ROLLOUT}.top_k", "Top-k sampling."),
    Alias(
        "gconfig.greedy",
        "AReaL",
        f"{ROLLOUT}.temperature",
        "Only false: training samples.",
        values.never_greedy,
    ),
    Alias("train_dataset.path", "AReaL", "data.train_files", "Training data."),
    Alias("train_dataset.batch_size", "AReaL", "data.train_batch_size", "Prompts a training step."),
    Alias("train_dataset.shuffle", "AReaL", "data.shuffle", "Shuffle every epoch."),
    Alias("train_dataset.max_length", "AReaL", "data.max_prompt_length", "Longest prompt."),
    Alias("valid_dataset.path", "AReaL", "data.val_files", "Held-out data."),
    Alias("valid_dataset.batch_size", "AReaL", "data.val_batch_size", "Held-out prompts at once."),
    Alias("experiment_name", "AReaL, verl", "trainer.experiment_name", "Name of the run."),
    Alias("total_train_epochs", "AReaL", "trainer.total_epochs", "Passes over the data."),
    Alias("total_train_steps", "AReaL", "trainer.total_training_steps", "Training steps."),
    Alias("tokenizer_path", "AReaL", f"{MODEL}.tokenizer_path", "The tokenizer."),
    Alias("saver.freq_steps", "AReaL", "trainer.save_freq", "Steps between checkpoints.", values.save_freq),
    Alias(
        "evaluator.freq_steps", "AReaL", "trainer.test_freq", "Steps between evaluations.", values.test_freq
    ),
    Alias("recover.mode", "AReaL", "trainer.resume_mode", "auto or disabled.", values.resume_mode),
    Alias("cluster.n_nodes", "AReaL", "trainer.nnodes", "Machines."),
    Alias("cluster.n_gpus_per_node", "AReaL", "trainer.n_gpus_per_node", "Devices a machine."),
    Alias("cluster.fileroot", "AReaL", "trainer.default_local_dir", "Folder that holds the run folders."),
)

_TRL = (
    Alias("epsilon", "TRL", f"{ACTOR}.clip_ratio", "ε of both sides, where epsilon_high is not set."),
    Alias("epsilon_high", "TRL", f"{ACTOR}.clip_ratio_high", "ε above 1."),
    Alias("delta", "TRL", f"{ACTOR}.clip_ratio_c", "Bound of the ratio where the advantage is negative."),
    Alias("num_generations", "TRL", f"{ROLLOUT}.n", "Responses a prompt."),
    Alias(
        "loss_type",
        "TRL",
        f"{ACTOR}.loss_agg_mode",
        "grpo, dr_grpo, bnpo, dapo, cispo, sapo.",
        values.trl_loss_type,
    ),
    Alias("beta", "TRL", f"{ACTOR}.kl_loss_coef", "KL in the loss; 0 switches it off.", values.kl_in_loss),
    Alias(
        "scale_rewards",
        "TRL",
        "algorithm.norm_adv_by_std_in_grpo",
        "group or none.",
        values.trl_scale_rewards,
    ),
    Alias("num_iterations", "TRL", f"{ACTOR}.ppo_epochs", "Passes over each rollout batch."),
    Alias(
        "steps_per_generation",
        "TRL",
        f"{ACTOR}.ppo_mini_batch_size",
        "Forwards a rollout batch; with gradient_accumulation_steps gives the mini-batches.",
        deferred=True,
    ),
    Alias(
        "gradient_accumulation_steps",
        "TRL",
        f"{ACTOR}.ppo_mini_batch_size",
        "Forwards an optimiser step.",
        deferred=True,
    ),
    Alias(
        "per_device_train_batch_size",
        "TRL",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
        "Responses a forward; times the accumulation gives the mini-batch.",
        deferred=True,
    ),
    Alias(
        "generation_batch_size", "TRL", "data.train_batch_size", "Responses a rollout batch.", deferred=True
    ),
    Alias("max_completion_length", "TRL", "data.max_response_length", "Longest response."),
    Alias("max_prompt_length", "TRL", "data.max_prompt_length", "Longest prompt."),
    Alias("num_train_epochs", "TRL", "trainer.total_epochs", "Passes over the data."),
    Alias("max_steps", "TRL", "trainer.total_training_steps", "Training steps."),
    Alias("max_grad_norm", "TRL", f"{ACTOR}.grad_clip", "Largest gradient norm."),
    Alias("lr_scheduler_type", "TRL", f"{ACTOR}.optim.lr_scheduler_type", "constant or cosine."),
    Alias("warmup_ratio", "TRL", f"{ACTOR}.optim.lr_warmup_steps_ratio", "Warm-up share."),
    Alias("warmup_steps", "TRL", f"{ACTOR}.optim.lr_warmup_steps", "Warm-up steps."),
    Alias("weight_decay", "TRL", f"{ACTOR}.optim.weight_decay", "Weight decay."),
    Alias(
        "gradient_checkpointing", "TRL", f"{MODEL}.enable_gradient_checkpointing", "Recompute activations."
    ),
    Alias("bf16", "TRL", f"{MODEL}.dtype", "bfloat16 compute.", values.bf16_dtype, is_switch=True),
    Alias("use_vllm", "TRL", f"{ROLLOUT}.name", "Generate with vLLM.", values.vllm_engine, is_switch=True),
    Alias("vllm_gpu_memory_utilization", "TRL", f"{ROLLOUT}.gpu_memory_utilization", "Memory of the engine."),
    Alias("vllm_tensor_parallel_size", "TRL", f"{ROLLOUT}.tensor_model_parallel_size", "Devices an engine."),
    Alias("report_to", "TRL", "trainer.logger", "wandb, tensorboard, trackio, none.", values.loggers),
    Alias("run_name", "TRL", "trainer.experiment_name", "Name of the run."),
    Alias("save_steps", "TRL", "trainer.save_freq", "Steps between checkpoints."),
    Alias("save_total_limit", "TRL", "trainer.max_actor_ckpt_to_keep", "Newest checkpoints kept."),
    Alias("eval_steps", "TRL", "trainer.test_freq", "Steps between evaluations."),
    Alias("model_name_or_path", "TRL", f"{MODEL}.path", "Hub name or folder."),
    Alias("dataset_name", "TRL", "data.train_files", "Training data."),
    Alias("lora_r", "TRL", f"{MODEL}.lora_rank", "Rank of LoRA adapters."),
    Alias("lora_target_modules", "TRL", f"{MODEL}.target_modules", "Modules that get adapters."),
)


@cache
def aliases() -> dict[str, Alias]:
    """Every alias by name."""
    table: dict[str, Alias] = {}
    for alias in (*_STANDALONE, *_SCRIPT, *_VERL, *_AREAL, *_TRL):
        assert alias.name not in table, f"alias {alias.name} twice"
        table[alias.name] = alias
    return table


def aliases_of(key: str) -> list[Alias]:
    """The aliases that lead to a key."""
    return [a for a in aliases().values() if a.target == key]
