"""verl's keys: what each is here, or why it has no effect, or which values it may have."""

from __future__ import annotations

from gspo.config.compat import alias_values as values
from gspo.config.compat.alias import Alias, Fixed

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
RUNS_IN_TRAINER = (
    "the reward model runs on the trainer's devices, packed up to reward_model.max_tokens_per_batch tokens"
)
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"
CORRECTION = "algorithm.rollout_correction"

ALIASES = (
    Alias(f"{ACTOR}.optim.warmup_style", "verl", f"{ACTOR}.optim.lr_scheduler_type"),
    Alias("critic.optim.warmup_style", "verl", "critic.optim.lr_scheduler_type"),
    Alias("trainer.max_checkpoints_to_keep", "verl", "trainer.max_actor_ckpt_to_keep"),
    Alias("trainer.resume_from_path", "verl", "trainer.resume_mode", values.resume_path),
    Alias("data.reward_fn_key", "verl", "data.data_source_key"),
    Alias("data.function_tool_path", "verl", f"{ROLLOUT}.multi_turn.function_tool_path"),
    Alias("data.tool_config_path", "verl", f"{ROLLOUT}.multi_turn.tool_config_path"),
    Alias("data.answer_key", "verl", "data.ground_truth_key"),
    Alias("data.dataset", "verl", "data.train_files"),
    Alias("data.train_max_samples", "verl", "data.num_train_samples", values.train_samples),
    Alias("data.val_max_samples", "verl", "data.num_val_samples", values.val_samples),
    Alias("data.trust_remote_code", "verl", f"{MODEL}.trust_remote_code"),
    Alias(f"{ACTOR}.ppo_micro_batch_size", "verl", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    Alias("reward.custom_reward_function.path", "verl", "custom_reward_function.path"),
    Alias("reward.custom_reward_function.name", "verl", "custom_reward_function.name"),
    Alias("reward.custom_reward_function.reward_kwargs", "verl", "custom_reward_function.reward_kwargs"),
    Alias("reward.reward_manager", "verl", "reward_model.reward_manager"),
    Alias("reward.reward_manager.name", "verl", "reward_model.reward_manager"),
    Alias("reward.reward_model.enable", "verl", "reward_model.enable"),
    Alias("reward.reward_model.model_path", "verl", "reward_model.path"),
    Alias("reward_model.model.path", "verl", "reward_model.path"),
    Alias("reward_model.forward_max_token_len_per_gpu", "verl", "reward_model.max_tokens_per_batch"),
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
    Alias(f"{ACTOR}.loss_mode", "verl", f"{ACTOR}.policy_loss.loss_mode"),
    Alias(f"{ACTOR}.tau_pos", "verl", f"{ACTOR}.policy_loss.tau_pos"),
    Alias(f"{ACTOR}.tau_neg", "verl", f"{ACTOR}.policy_loss.tau_neg"),
    Alias(f"{ACTOR}.optim.clip_grad", "verl", f"{ACTOR}.grad_clip"),
    Alias("critic.optim.clip_grad", "verl", "critic.grad_clip"),
    Alias(f"{ACTOR}.use_remove_padding", "verl", f"{MODEL}.use_remove_padding"),
    Alias(f"{ACTOR}.use_prefix_grouper", "verl", f"{MODEL}.use_shared_prefix"),
    Alias(f"{ACTOR}.fsdp_config.strategy", "verl", f"{ACTOR}.strategy", values.strategy),
    Alias(f"{ACTOR}.fsdp_config.dtype", "verl", f"{MODEL}.dtype", values.dtype),
    Alias(f"{ACTOR}.fsdp_config.use_torch_compile", "verl", f"{ACTOR}.use_torch_compile"),
    Alias(f"{ACTOR}.fsdp_config.entropy_checkpointing", "verl", f"{ACTOR}.entropy_checkpointing"),
    Alias(f"{ACTOR}.fsdp_config.full_determinism", "verl", "trainer.deterministic"),
    Alias(f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size", "verl", f"{ACTOR}.ulysses_sequence_parallel_size"),
    Alias(f"{ROLLOUT}.log_prob_micro_batch_size", "verl", f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"),
    Alias("actor_rollout_ref.ref.model.path", "verl", f"{REF}.path"),
    Alias("actor_rollout_ref.ref.log_prob_micro_batch_size", "verl", f"{REF}.log_prob_micro_batch_size_per_gpu"),
    Alias("critic.ppo_micro_batch_size", "verl", "critic.ppo_micro_batch_size_per_gpu"),
    Alias(f"{MODEL}.torch_dtype", "verl", f"{MODEL}.dtype", values.dtype),
    Alias(f"{MODEL}.override_config.attn_implementation", "verl", f"{MODEL}.attn_implementation", values.attention),
    Alias(f"{MODEL}.lora.rank", "verl", f"{MODEL}.lora_rank"),
    Alias(f"{MODEL}.lora.alpha", "verl", f"{MODEL}.lora_alpha"),
    Alias(f"{MODEL}.lora.target_modules", "verl", f"{MODEL}.target_modules"),
    Alias(f"{MODEL}.lora.exclude_modules", "verl", f"{MODEL}.exclude_modules", values.excluded_modules),
    *(
        alias
        for part in (ACTOR, "critic")
        for alias in (
            Alias(f"{part}.optim.lr_decay_style", "verl", f"{part}.optim.lr_scheduler_type"),
            Alias(f"{part}.optim.decay_type", "verl", f"{part}.optim.lr_scheduler_type"),
            Alias(f"{part}.optim.min_lr_factor", "verl", f"{part}.optim.min_lr_ratio"),
            Alias(f"{part}.optim.lr_decay_steps", "verl", f"{part}.optim.total_training_steps"),
        )
    ),
    Alias("reward_manager.name", "verl", "reward_model.reward_manager"),
    Alias(f"{CORRECTION}.rollout_is", "verl", f"{ACTOR}.use_decoupled_loss", values.rollout_is),
    Alias(f"{CORRECTION}.rollout_is_threshold", "verl", f"{ACTOR}.behav_imp_weight_cap", values.rollout_is_threshold),
    Alias(f"{CORRECTION}.bypass_mode", "verl", f"{ACTOR}.old_log_prob_source", values.bypass_mode),
    *(
        Alias(f"critic.{part}.{key}", "verl", f"critic.fsdp_config.{key}")
        for part in ("model.fsdp_config", "fsdp")
        for key in ("param_offload", "optimizer_offload", "offload_policy", "reshard_after_forward", "fsdp_size")
    ),
)

# Parts of a key's name that say what it is about, wherever they stand.
ANYWHERE = {
    "_target_": "it names a class of verl",
    "profiler": "profile with torch or nsys from outside; `timing_s/*` has the time of each stage",
    "megatron": "models are sharded with FSDP2 (actor.strategy=fsdp2), not with Megatron",
    "veomni": "models are sharded with FSDP2 (actor.strategy=fsdp2), not with VeOmni",
    "torchtitan": "models are sharded with FSDP2 (actor.strategy=fsdp2), not with TorchTitan",
    "turbo_config": "models are sharded with FSDP2, without further plans",
    "wrap_policy": "every decoder layer is sharded by itself",
    "disaggregation": "an engine prefills and decodes in one place",
    "mm_processor_kwargs": "prompts are text",
}

# Keys, or sections with all their keys, that have no effect, and why.
NO_EFFECT = {
    "defaults": "Hydra's defaults list is not read; values that are not set have the defaults of this program",
    "hydra": "gspo does not use Hydra",
    "data.return_raw_chat": "rows always keep their messages",
    "data.return_raw_input_ids": "rows always keep their token ids",
    "data.return_full_prompt": "rows always keep their prompt",
    "data.return_multi_modal_inputs": "prompts are text",
    "data.image_key": "prompts are text",
    "data.video_key": "prompts are text",
    "data.audio_key": "prompts are text",
    "data.image_patch_size": "prompts are text",
    "data.use_shm": "files are read from where they are",
    "data.validation_shuffle": "the order of held-out prompts does not change a result",
    "data.dataloader_num_workers": "prompts are tokenized once, at the start",
    "data.filter_overlong_prompts_workers": "prompts are tokenized once, at the start",
    "data.tokenizer": "the tokenizer is actor_rollout_ref.model.tokenizer_path",
    "actor_rollout_ref.hybrid_engine": "rollout.name, rollout.mode and rollout.num_workers decide whether policy and engine share a process",
    "actor_rollout_ref.nccl_timeout": "trainer.watchdog_stop_seconds bounds how long a run may hang",
    f"{ACTOR}.use_fused_kernels": "log-probs are always computed in chunks",
    f"{ACTOR}.entropy_from_logits_with_chunking": "log-probs and entropies are always computed in chunks",
    f"{ACTOR}.entropy_from_logits_chunk_size": "log-probs and entropies are always computed in chunks",
    f"{ACTOR}.calculate_entropy": "the entropy is always measured",
    f"{ACTOR}.rollout_n": "it follows rollout.n",
    f"{ACTOR}.data_loader_seed": "trainer.seed is the seed of all random numbers",
    f"{ACTOR}.pad_to_length": "sequences are packed without padding",
    f"{ACTOR}.router_replay": "experts are not replayed; metrics say how far the router moved",
    f"{ACTOR}.checkpoint": "a checkpoint always contains the whole state",
    f"{ACTOR}.fsdp_config": "master weights are float32 and prefetching is always on",
    f"{ACTOR}.sum_pi_squared_checkpointing": "it belongs to an estimator that is not supported",
    f"{ACTOR}.optim.zero_indexed_step": "the schedule counts training steps from 0",
    "critic.optim.zero_indexed_step": "the schedule counts training steps from 0",
    f"{MODEL}.use_fused_kernels": "log-probs are always computed in chunks",
    f"{MODEL}.fused_kernel_options": "log-probs are always computed in chunks",
    f"{MODEL}.use_liger": "log-probs are always computed in chunks, and layers are compiled",
    f"{MODEL}.tiled_mlp": "memory is bounded by ppo_max_token_len_per_gpu",
    f"{MODEL}.enable_activation_offload": "use enable_gradient_checkpointing",
    f"{MODEL}.use_shm": "models are read from the folder they are in",
    f"{MODEL}.external_lib": "use trainer.plugins",
    f"{MODEL}.lora": "LoRA has a rank, a scale and target modules here",
    f"{REF}.fsdp_config": "master weights are float32 and prefetching is always on",
    f"{REF}.optim": "the reference is not trained",
    f"{REF}.rollout_n": "it follows rollout.n",
    f"{REF}.use_torch_compile": "it follows actor.use_torch_compile",
    f"{REF}.ulysses_sequence_parallel_size": "it follows actor.ulysses_sequence_parallel_size",
    f"{REF}.fsdp_config.ulysses_sequence_parallel_size": "it follows actor.ulysses_sequence_parallel_size",
    f"{REF}.strategy": "it follows actor.strategy",
    f"{REF}.router_replay": "experts are not replayed",
    f"{REF}.entropy_from_logits_with_chunking": "log-probs are always computed in chunks",
    f"{REF}.entropy_from_logits_chunk_size": "log-probs are always computed in chunks",
    f"{REF}.entropy_checkpointing": "the reference has no gradient",
    f"{REF}.pad_to_length": "sequences are packed without padding",
    f"{ROLLOUT}.load_format": "the engine always gets the trainer's weights",
    f"{ROLLOUT}.disable_log_stats": "the metrics always include engine statistics",
    f"{ROLLOUT}.layered_summon": "the engine always gets the trainer's weights",
    f"{ROLLOUT}.layered_summon_param": "the engine always gets the trainer's weights",
    f"{ROLLOUT}.multi_stage_wake_up": "the engine always wakes up in one stage",
    f"{ROLLOUT}.checkpoint_engine": "weights reach engines through shared memory, or with Ray its object store",
    f"{ROLLOUT}.update_weights_bucket_megabytes": "weights reach engines through shared memory, or with Ray its object store",
    f"{ROLLOUT}.cudagraph_capture_sizes": "the engine chooses them",
    f"{ROLLOUT}.scheduling_policy": "requests are served in the order of submission",
    f"{ROLLOUT}.logprobs_mode": "log-probs are always those under the sampling temperature",
    f"{ROLLOUT}.data_parallel_size": "rollout.num_workers is the number of engines",
    f"{ROLLOUT}.expert_parallel_size": "an engine is sharded by rollout.tensor_model_parallel_size",
    f"{ROLLOUT}.pipeline_model_parallel_size": "an engine is sharded by rollout.tensor_model_parallel_size",
    f"{ROLLOUT}.n_gpus_per_node": "rollout.num_workers is the number of engines",
    f"{ROLLOUT}.nnodes": "rollout.num_workers is the number of engines",
    f"{ROLLOUT}.seed": "trainer.seed is the seed of all random numbers",
    f"{ROLLOUT}.full_determinism": "sampling is deterministic for each submission; trainer.deterministic covers the GPU",
    f"{ROLLOUT}.skip_tokenizer_init": "an engine uses no tokenizer",
    f"{ROLLOUT}.skip_dump_dir": "rollouts are not skipped",
    f"{ROLLOUT}.limit_images": "prompts are text",
    f"{ROLLOUT}.moe_load_balance_metrics_interval": "metrics are written in every step",
    f"{ROLLOUT}.prometheus": "metrics are in metrics.jsonl and in trainer.logger",
    f"{ROLLOUT}.trace": "every group is in the run folder",
    f"{ROLLOUT}.multi_turn": "see docs/environments.md for what rollouts of several turns use",
    f"{ROLLOUT}.agent": "rollout.num_workers is the number of engines",
    f"{ROLLOUT}.mtp": "tokens are generated one by one",
    f"{MODEL}.mtp": "tokens are generated one by one",
    "critic.strategy": "it follows actor.strategy",
    "critic.shuffle": "it follows actor.shuffle",
    "critic.use_dynamic_bsz": "it follows actor.use_dynamic_bsz",
    "critic.ulysses_sequence_parallel_size": "it follows actor.ulysses_sequence_parallel_size",
    **{
        f"critic.{section}.ulysses_sequence_parallel_size": "it follows actor.ulysses_sequence_parallel_size"
        for section in ("fsdp", "fsdp_config", "model.fsdp_config")
    },
    "critic.checkpoint": "a checkpoint always contains the whole state",
    "critic.rollout_n": "it follows rollout.n",
    "critic.data_loader_seed": "trainer.seed is the seed of all random numbers",
    "critic.forward_micro_batch_size": "it follows the micro-batch of the update",
    "critic.forward_micro_batch_size_per_gpu": "it follows the micro-batch of the update",
    "critic.forward_max_token_len_per_gpu": "it follows critic.ppo_max_token_len_per_gpu",
    "critic.loss_scale_factor": "the critic's loss is a mean over tokens",
    "critic.loss_agg_mode": "the critic's loss is a mean over tokens",
    "critic.nccl_timeout": "trainer.watchdog_stop_seconds bounds how long a run may hang",
    f"{ACTOR}.qat": "weights are trained in bfloat16 or float32",
    f"{ROLLOUT}.qat": "weights are trained in bfloat16 or float32",
    **{
        f"{part}.optim.{key}": "the optimiser is torch's AdamW on float32 master weights"
        for part in (ACTOR, "critic")
        for key in (
            *(
                "use_checkpoint_opt_param_scheduler",
                "use_precision_aware_optimizer",
                "main_grads_dtype",
                "exp_avg_dtype",
            ),
            *("exp_avg_sq_dtype", "use_layer_wise_distributed_optimizer", "muon_momentum", "muon_nesterov"),
            *("muon_split_qkv", "muon_scale_mode", "muon_coefficient_type", "muon_num_ns_steps", "muon_tp_mode"),
            *("muon_fp32_matmul_prec", "muon_extra_scale_factor", "muon_scalar_optimizer"),
            *("muon_match_adamw_update_rms", "lr_wsd_decay_style", "lr_wsd_decay_steps"),
        )
    },
    "critic.model": "the critic's model has the settings of actor_rollout_ref.model; only its path is its own",
    "critic.fsdp": "master weights are float32 and prefetching is always on",
    "critic.fsdp_config": "master weights are float32 and prefetching is always on",
    "reward_manager": "reward managers are selected by name: reward_model.reward_manager",
    "reward.reward_manager.module": "reward managers are selected by name: reward_model.reward_manager",
    "reward.reward_model": RUNS_IN_TRAINER,
    "reward.sandbox_fusion": "model-written code runs in the built-in sandbox",
    "sandbox_fusion": "model-written code runs in the built-in sandbox",
    "reward_model.sandbox_fusion": "model-written code runs in the built-in sandbox",
    "reward_model.launch_reward_fn_async": "rewards are always computed during generation",
    "reward_model.use_reward_loop": "rewards are always computed during generation",
    "reward_model.reward_loop_source": "rewards are always computed during generation",
    "reward_model.reward_loop_module_path": "rewards are always computed during generation",
    "reward_model.reward_loop_class_name": "rewards are always computed during generation",
    **{
        f"reward_model.{key}": RUNS_IN_TRAINER
        for key in (
            *("strategy", "model", "rollout", "micro_batch_size", "micro_batch_size_per_gpu", "max_length", "nnodes"),
            *("use_dynamic_bsz", "ulysses_sequence_parallel_size"),
            *("enable_resource_pool", "n_gpus_per_node"),
        )
    },
    "algorithm.pf_ppo": "use_pf_ppo is off",
    "algorithm.filter_groups.max_inflight_gen_batches": "use algorithm.filter_groups.max_in_flight, which counts groups",
    "distillation": "distillation.enabled is off",
    "ray_kwargs": "Ray is configured by RAY_ADDRESS and `ray job submit`",
    "ray_init": "Ray is configured by RAY_ADDRESS and `ray job submit`",
    "global_profiler": "profile with torch or nsys from outside; `timing_s/*` has the time of each stage",
    "transfer_queue": "batches stay in the trainer's process",
    "skip": "rollouts are not skipped",
    "trainer.balance_batch": "micro-batches are always balanced by tokens",
    "trainer.default_hdfs_dir": "runs are local folders",
    "trainer.ray_wait_register_center_timeout": "gspo has no register center",
    "trainer.rollout_data_dir": "groups are written to the run folder unless trainer.save_groups is false",
    "trainer.validation_data_dir": "evaluations are always written to the run folder",
    "trainer.esi_redundant_time": "a signal saves and stops the run",
    "trainer.del_local_ckpt_after_load": "old checkpoints go by trainer.max_actor_ckpt_to_keep",
    "trainer.max_critic_ckpt_to_keep": "a checkpoint has all models; trainer.max_actor_ckpt_to_keep counts them",
    "trainer.use_legacy_worker_impl": "there is one implementation",
    "trainer.use_v1": "there is one trainer; rollout.mode and rollout.max_head_offpolicyness make it asynchronous",
    "trainer.v1": "there is one trainer; rollout.mode and rollout.max_head_offpolicyness make it asynchronous",
}

_NOT_SUPPORTED = "not supported; remove it"
FIXED = {
    "trainer.val_only": Fixed((False,), "use `gspo eval`"),
    "data.sampler.class_path": Fixed((), "data.shuffle decides the order; or order the rows of the file"),
    "data.sampler.class_name": Fixed((), "data.shuffle decides the order; or order the rows of the file"),
    "data.datagen.path": Fixed((), "name the generated rows as a file in data.train_files"),
    "data.datagen.name": Fixed((), "name the generated rows as a file in data.train_files"),
    f"{ROLLOUT}.multi_turn.interaction_config_path": Fixed((), "write it as an environment and set environment.path"),
    f"{ROLLOUT}.agent.default_agent_loop": Fixed(
        ("single_turn_agent", "tool_agent"), "tools and turns are set by rollout.multi_turn and environment; remove it"
    ),
    f"{ROLLOUT}.agent.agent_loop_config_path": Fixed((), "a response is one turn; remove it"),
    f"{ROLLOUT}.do_sample": Fixed((True,), "all greedy responses of a prompt are the same and teach nothing"),
    f"{ROLLOUT}.over_sample_rate": Fixed((0,), "algorithm.filter_groups.strategy=stream keeps slots full instead"),
    f"{ROLLOUT}.repetition_penalty": Fixed(
        (1,), "sampling has no penalty; reward.repetition_penalty takes repetition off the reward"
    ),
    f"{ROLLOUT}.skip_rollout": Fixed((False,), "rollouts cannot be skipped; `gspo replay` replays recorded ones"),
    f"{ROLLOUT}.quantization": Fixed((), "engines run in the precision of rollout.dtype; remove it"),
    f"{ROLLOUT}.quantization_config_file": Fixed((), "engines run in the precision of rollout.dtype; remove it"),
    f"{ROLLOUT}.enable_rollout_routing_replay": Fixed((False,), _NOT_SUPPORTED),
    f"{ROLLOUT}.disaggregation.enabled": Fixed((False,), "an engine prefills and decodes in one place; remove it"),
    f"{ACTOR}.router_replay.mode": Fixed(("disabled",), "experts are not replayed; remove it"),
    f"{ACTOR}.freeze_vision_tower": Fixed((False,), "models are text only; remove it"),
    f"{ACTOR}.calculate_sum_pi_squared": Fixed((False,), "its estimator is not supported; choose grpo or rloo"),
    f"{ACTOR}.qat.enable": Fixed((False,), "train in bfloat16 or float32; remove it"),
    f"{ACTOR}.fsdp_config.qat.enable": Fixed((False,), "train in bfloat16 or float32; remove it"),
    f"{ACTOR}.policy_loss.dro_beta": Fixed((), "choose one of the losses of loss_mode"),
    **{
        f"{part}.optim.{key}": fixed
        for part in (ACTOR, "critic")
        for key, fixed in {
            "optimizer": Fixed(("AdamW", "adam", "adamw"), "the optimiser is AdamW; remove it"),
            "name": Fixed(("AdamW", "adam", "adamw"), "the optimiser is AdamW; remove it"),
            "optimizer_impl": Fixed(("torch.optim",), "the optimiser is torch's AdamW; remove it"),
            "num_cycles": Fixed((0.5,), "the cosine falls once, to min_lr_ratio; remove it"),
            "min_lr": Fixed((0,), "set optim.min_lr_ratio, a share of the peak"),
            "lr_min": Fixed((0,), "set optim.min_lr_ratio, a share of the peak"),
            "lr_warmup_init": Fixed((0,), "the warm-up begins at 0; remove it"),
            "lr_start": Fixed((0,), "the warm-up begins at 0; remove it"),
            "lr_decay_ratio": Fixed((1,), "set optim.total_training_steps, the steps of the schedule"),
            "weight_decay_incr_style": Fixed(("constant",), "the weight decay is constant; remove it"),
            "override_optimizer_config": Fixed(({},), "set optim.betas, optim.eps and optim.weight_decay"),
        }.items()
    },
    f"{MODEL}.hf_config_path": Fixed((), "put config.json into the model's folder; override_config changes values"),
    f"{MODEL}.custom_chat_template": Fixed((), "put it into the tokenizer's folder as chat_template.jinja"),
    f"{MODEL}.lora_adapter_path": Fixed(
        (), "merge the adapter into the model, and name the merged folder in model.path"
    ),
    f"{MODEL}.lora.adapter_path": Fixed(
        (), "merge the adapter into the model, and name the merged folder in model.path"
    ),
    f"{MODEL}.mtp.enable": Fixed((False,), _NOT_SUPPORTED),
    "critic.model.lora_rank": Fixed((0,), "the critic is trained whole; remove it"),
    "critic.model.lora.rank": Fixed((0,), "the critic is trained whole; remove it"),
    "reward_manager.source": Fixed(("register",), "name your reward in custom_reward_function.path"),
    "reward_manager.module.path": Fixed((), "name your reward in custom_reward_function.path"),
    "reward.reward_manager.source": Fixed(("register",), "name your reward in custom_reward_function.path"),
    "reward.reward_manager.module.path": Fixed((), "name your reward in custom_reward_function.path"),
    "algorithm.use_pf_ppo": Fixed((False,), "algorithm.filter_groups filters groups; remove it"),
    "distillation.enabled": Fixed((False,), "set algorithm.adv_estimator=opd and actor_rollout_ref.ref.path"),
    f"{CORRECTION}.rollout_rs": Fixed(
        (), "use behav_imp_weight_mode=sequence_mask or token_mask with behav_imp_weight_cap"
    ),
    f"{CORRECTION}.rollout_rs_threshold": Fixed((), "set actor.behav_imp_weight_cap"),
    f"{CORRECTION}.rollout_token_veto_threshold": Fixed((), "use behav_imp_weight_mode=token_mask"),
    f"{CORRECTION}.rollout_is_batch_normalize": Fixed((False,), "weights are used as they are; remove it"),
    f"{CORRECTION}.loss_type": Fixed(("ppo_clip",), "choose the loss in actor.policy_loss.loss_mode"),
}

# Our keys whose values verl writes in another way.
VALUES = {
    "trainer.logger": values.logger_list,
    "trainer.resume_mode": values.own_resume_mode,
    f"{ACTOR}.strategy": values.own_strategy,
    f"{ROLLOUT}.name": values.engine_name,
    f"{ROLLOUT}.dtype": values.own_dtype,
    f"{MODEL}.dtype": values.own_dtype,
    f"{MODEL}.attn_implementation": values.own_attention,
}
