"""The fields of TRL's GRPOConfig: what each is here."""

from __future__ import annotations

from gspo.config.compat import alias_values as values
from gspo.config.compat import trl_values
from gspo.config.compat.alias import Alias, Fixed

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"

ALIASES = (
    Alias("epsilon", "TRL", f"{ACTOR}.clip_ratio"),
    Alias("epsilon_high", "TRL", f"{ACTOR}.clip_ratio_high"),
    Alias("delta", "TRL", f"{ACTOR}.clip_ratio_c"),
    Alias("num_generations", "TRL", f"{ROLLOUT}.n"),
    Alias("loss_type", "TRL", f"{ACTOR}.loss_agg_mode", trl_values.loss_type),
    Alias("beta", "TRL", f"{ACTOR}.kl_loss_coef", values.kl_in_loss),
    Alias("scale_rewards", "TRL", "algorithm.norm_adv_by_std_in_grpo", trl_values.scale_rewards),
    Alias(
        "reward_weights",
        "TRL",
        "reward.functions",
        deferred="One weight per entry of reward.functions, in their order.",
    ),
    Alias("reward_funcs", "TRL", "reward.functions", trl_values.reward_funcs),
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
    Alias("max_tool_calling_iterations", "TRL", f"{ROLLOUT}.multi_turn.max_assistant_turns", values.tool_iterations),
    Alias("max_completion_length", "TRL", "data.max_response_length"),
    Alias("max_prompt_length", "TRL", "data.max_prompt_length"),
    Alias("num_train_epochs", "TRL", "trainer.total_epochs"),
    Alias("max_steps", "TRL", "trainer.total_training_steps", trl_values.max_steps),
    Alias("max_grad_norm", "TRL", f"{ACTOR}.grad_clip"),
    Alias("lr_scheduler_type", "TRL", f"{ACTOR}.optim.lr_scheduler_type", trl_values.scheduler),
    Alias("warmup_ratio", "TRL", f"{ACTOR}.optim.lr_warmup_steps_ratio"),
    Alias("warmup_steps", "TRL", f"{ACTOR}.optim.lr_warmup_steps", trl_values.warmup),
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
    Alias("adam_beta1", "TRL", f"{ACTOR}.optim.betas", deferred="AdamW's decay rate of the first moment."),
    Alias("adam_beta2", "TRL", f"{ACTOR}.optim.betas", deferred="AdamW's decay rate of the second moment."),
    Alias("adam_epsilon", "TRL", f"{ACTOR}.optim.eps"),
    Alias("entropy_coef", "TRL", f"{ACTOR}.entropy_coeff"),
    Alias("sapo_temperature_pos", "TRL", f"{ACTOR}.policy_loss.tau_pos"),
    Alias("sapo_temperature_neg", "TRL", f"{ACTOR}.policy_loss.tau_neg"),
    Alias("mask_truncated_completions", "TRL", "algorithm.mask_truncated"),
    Alias("num_generations_eval", "TRL", f"{ROLLOUT}.val_kwargs.n"),
    Alias("shuffle_dataset", "TRL", "data.shuffle"),
    Alias("chat_template_kwargs", "TRL", "data.apply_chat_template_kwargs"),
    Alias("model_init_kwargs", "TRL", f"{MODEL}.dtype", trl_values.model_init),
    Alias("vllm_mode", "TRL", f"{ROLLOUT}.free_cache_engine", trl_values.vllm_mode),
    Alias("vllm_enable_sleep_mode", "TRL", f"{ROLLOUT}.free_cache_engine"),
    Alias("vllm_max_model_length", "TRL", f"{ROLLOUT}.max_model_len"),
    Alias("vllm_importance_sampling_correction", "TRL", f"{ACTOR}.use_decoupled_loss"),
    Alias("vllm_importance_sampling_mode", "TRL", f"{ACTOR}.behav_imp_weight_mode", trl_values.is_mode),
    Alias("vllm_importance_sampling_clip_max", "TRL", f"{ACTOR}.behav_imp_weight_cap"),
    Alias("vllm_importance_sampling_cap", "TRL", f"{ACTOR}.behav_imp_weight_cap"),
    Alias("eval_strategy", "TRL", "trainer.test_freq", trl_values.eval_strategy),
    Alias("eval_on_start", "TRL", "trainer.val_before_train"),
    Alias("save_strategy", "TRL", "trainer.save_freq", trl_values.save_strategy),
    Alias("fp16", "TRL", f"{MODEL}.dtype", values.fp16_dtype, is_switch=True),
    Alias("torch_compile", "TRL", f"{ACTOR}.use_torch_compile"),
    Alias("use_cpu", "TRL", "trainer.device", values.on_cpu, is_switch=True),
    Alias("full_determinism", "TRL", "trainer.deterministic"),
    Alias("data_seed", "TRL", "data.seed"),
    Alias("project", "TRL", "trainer.project_name"),
    Alias("resume_from_checkpoint", "TRL", "trainer.resume_mode", values.resume_checkpoint),
    Alias("lora_r", "TRL", f"{MODEL}.lora_rank"),
    Alias("lora_target_modules", "TRL", f"{MODEL}.target_modules"),
)

_EVERY_STEP = "metrics are written in every step"
_HUB = "push a checkpoint's folder with huggingface_hub"
_LOADER = "prompts are tokenized once, at the start"
_RANKS = "actor.strategy=fsdp2 trains on several devices"
_VLLM = "a run starts its engines itself; see rollout.name and rollout.num_workers"

# Fields that have no effect, and why.
NO_EFFECT = {
    "remove_unused_columns": "reward functions always get every column",
    "disable_dropout": "dropout is always off in reinforcement learning",
    "log_completions": "groups are written to the run folder unless trainer.save_groups is false",
    "router_aux_loss_coef": "experts are not balanced by a loss",
    "pad_to_multiple_of": "sequences are packed without padding",
    "cache_implementation": "the engine has its own cache",
    "ref_model_mixup_alpha": "sync_ref_model is off",
    "ref_model_sync_steps": "sync_ref_model is off",
    **dict.fromkeys(
        ("entropy_coef_min", "entropy_coef_max", "entropy_coef_delta", "entropy_target"), "use_adaptive_entropy is off"
    ),
    **dict.fromkeys(
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"), "the loss vespo is not supported"
    ),
    **dict.fromkeys(
        (
            *("vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout", "vllm_group_port"),
            *("vllm_model_impl", "use_transformers_continuous_batching", "transformers_continuous_batching_config"),
            "use_transformers_paged",
        ),
        _VLLM,
    ),
    **dict.fromkeys(
        ("log_multimodal", "num_completions_to_print", "log_unique_prompts", "log_completions_hub_repo"),
        "groups are in the run folder; gspo report shows them",
    ),
    **dict.fromkeys(
        (
            *("logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "log_on_each_node"),
            *(
                "logging_nan_inf_filter",
                "include_num_input_tokens_seen",
                "log_level",
                "log_level_replica",
                "disable_tqdm",
            ),
            *("include_tokens_per_second", "skip_memory_metrics", "debug", "include_for_metrics"),
        ),
        _EVERY_STEP,
    ),
    **dict.fromkeys(
        (
            *("hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
            *("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"),
        ),
        _HUB,
    ),
    **dict.fromkeys(
        (
            *(
                "dataloader_drop_last",
                "dataloader_num_workers",
                "dataloader_pin_memory",
                "dataloader_persistent_workers",
            ),
            *("dataloader_prefetch_factor", "dataloader_multiprocessing_context", "dataloader_in_order", "label_names"),
            *("group_by_length", "length_column_name", "ignore_data_skip"),
        ),
        _LOADER,
    ),
    **dict.fromkeys(
        (
            *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"),
            *("ddp_backend", "ddp_timeout", "fsdp", "fsdp_config", "deepspeed", "accelerator_config", "local_rank"),
            *("parallelism_config", "average_tokens_across_devices", "ds3_gather_for_generation"),
        ),
        _RANKS,
    ),
    **dict.fromkeys(
        (
            *("per_device_eval_batch_size", "eval_delay", "prediction_loss_only", "eval_do_concat_batches"),
            *("eval_use_gather_object", "eval_accumulation_steps", "batch_eval_metrics"),
        ),
        "evaluations generate answers; data.val_batch_size is how many at once",
    ),
    **dict.fromkeys(
        (
            *(
                "save_only_model",
                "save_on_each_node",
                "enable_jit_checkpoint",
                "overwrite_output_dir",
                "save_safetensors",
            ),
            *("restore_callback_states_from_checkpoint", "metric_for_best_model", "greater_is_better"),
        ),
        "a checkpoint always contains the whole state",
    ),
    "do_train": "train() trains",
    "do_eval": "eval_strategy decides",
    "do_predict": "use `gspo eval`",
    "tf32": "torch decides it",
    "cast_lm_head_to_fp32": "logits are always computed in float32",
    "bf16_full_eval": "evaluations run in the precision of training",
    "fp16_full_eval": "evaluations run in the precision of training",
    "gradient_checkpointing_kwargs": "checkpointing is per decoder layer",
    "torch_compile_backend": "layers are compiled with inductor",
    "torch_compile_mode": "layers are compiled with inductor",
    "use_liger_kernel": "log-probs are always computed in chunks, and layers are compiled",
    "liger_kernel_config": "log-probs are always computed in chunks, and layers are compiled",
    "use_liger_loss": "log-probs are always computed in chunks",
    "use_cache": "training needs none, and the engine always has one",
    "torch_empty_cache_steps": "memory is bounded by ppo_max_token_len_per_gpu",
    "optim_target_modules": "all trained weights have the same optimiser",
    "train_sampling_strategy": "data.shuffle decides the order",
}

FIXED: dict[str, Fixed] = {
    "repetition_penalty": Fixed(
        (1,), "sampling has no penalty; reward.repetition_penalty takes repetition off the reward"
    ),
    "min_p": Fixed((0,), "sample with top_p or top_k"),
    "generation_kwargs": Fixed(({},), "set temperature, top_p and top_k; rollout.engine_kwargs are those of vLLM"),
    "multi_objective_aggregation": Fixed(("sum_then_normalize",), "scores are added, then normalised; remove it"),
    "sync_ref_model": Fixed((False,), "the reference is fixed; remove it"),
    "top_entropy_quantile": Fixed((1,), "every token is trained on; remove it"),
    "use_adaptive_entropy": Fixed((False,), "set entropy_coef"),
    "off_policy_mask_threshold": Fixed((), "use_decoupled_loss and behav_imp_weight_cap mask stale tokens"),
    "use_bias_correction_kl": Fixed((False,), "set actor.kl_loss_type=k3+, whose gradient is that of the KL"),
    "vllm_structured_outputs_regex": Fixed((), "reward the format instead: reward.format_weight"),
    "vllm_importance_sampling_clip_min": Fixed((0,), "weights have an upper bound only; remove it"),
    "push_to_hub": Fixed((False,), _HUB),
    "load_best_model_at_end": Fixed((False,), "set trainer.keep_best=1; `gspo eval RUN` uses the best checkpoint"),
    "neftune_noise_alpha": Fixed((), "remove it"),
    "label_smoothing_factor": Fixed((0,), "remove it"),
    "auto_find_batch_size": Fixed((False,), "`gspo doctor` computes the memory that a config needs"),
    "lr_scheduler_kwargs": Fixed(({},), "set actor.optim.min_lr_ratio"),
    "optim_args": Fixed(("",), "set actor.optim.betas, eps and weight_decay"),
    "optim": Fixed(
        ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw"),
        "the optimiser is AdamW; set actor.optim.eight_bit=true for 8-bit state, or remove it",
    ),
}
