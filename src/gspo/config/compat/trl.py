"""The fields of TRL's GRPOConfig: what each is here."""

from __future__ import annotations

from gspo.config.compat import alias_values as values
from gspo.config.compat.alias import Alias, Fixed

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"

ALIASES = (
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

# Fields that have no effect, and why.
NO_EFFECT = {
    "logging_steps": "every step is logged",
    "log_completions": "groups are written to the run folder unless trainer.save_groups is false",
    "disable_dropout": "dropout is always off in reinforcement learning",
    "remove_unused_columns": "reward functions always get every column",
}

FIXED: dict[str, Fixed] = {
    "repetition_penalty": Fixed(
        (1,), "sampling has no penalty; reward.repetition_penalty takes repetition off the reward"
    )
}
