"""AReaL's keys: what each is here."""

from __future__ import annotations

from dataclasses import replace

from gspo.config.compat import alias_values as values
from gspo.config.compat import areal_values
from gspo.config.compat.alias import Alias, Fixed

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
ROLLOUT = "actor_rollout_ref.rollout"
FILTER = "algorithm.filter_groups"
OVERLONG = "reward_model.reward_kwargs.overlong_buffer_cfg"

# Keys of AReaL's `actor` section, which may also be written at the top.
_AREAL_ACTOR = (
    Alias("importance_sampling_level", "AReaL", f"{ACTOR}.importance_sampling_level"),
    Alias("group_size", "AReaL", f"{ROLLOUT}.n"),
    Alias("dynamic_sampling", "AReaL", f"{FILTER}.enable"),
    Alias("use_decoupled_loss", "AReaL", f"{ACTOR}.use_decoupled_loss"),
    Alias("behav_imp_weight_cap", "AReaL", f"{ACTOR}.behav_imp_weight_cap"),
    Alias("behave_imp_weight_cap", "AReaL", f"{ACTOR}.behav_imp_weight_cap"),
    Alias("behav_imp_weight_mode", "AReaL", f"{ACTOR}.behav_imp_weight_mode"),
    Alias("eps_clip", "AReaL", f"{ACTOR}.clip_ratio", areal_values.eps_clip),
    Alias("eps_clip_higher", "AReaL", f"{ACTOR}.clip_ratio_high"),
    Alias("c_clip", "AReaL", f"{ACTOR}.clip_ratio_c"),
    Alias("kl_ctl", "AReaL", "algorithm.kl_ctrl.kl_coef", values.kl_in_reward),
    Alias("kl_estimator", "AReaL", "algorithm.kl_penalty"),
    Alias("reward_scaling", "AReaL", "reward.scale"),
    Alias("reward_bias", "AReaL", "reward.bias"),
    Alias("reward_clip", "AReaL", "reward.clip"),
    Alias("reward_norm.mean_level", "AReaL", "algorithm.norm_adv_by_std_in_grpo", areal_values.mean_level),
    Alias("reward_norm.mean_leave1out", "AReaL", "algorithm.norm_adv_by_std_in_grpo", areal_values.leave_one_out),
    Alias("reward_norm.std_level", "AReaL", "algorithm.norm_adv_by_std_in_grpo", areal_values.std_level),
    Alias("adv_norm.mean_level", "AReaL", "algorithm.normalize_advantages", areal_values.adv_norm),
    Alias("adv_norm.std_level", "AReaL", "algorithm.normalize_advantages", areal_values.adv_norm),
    Alias("rejection_sampling.upper", "AReaL", f"{ACTOR}.behav_imp_weight_cap"),
    Alias("rejection_sampling.level", "AReaL", f"{ACTOR}.behav_imp_weight_mode", areal_values.rejection_level),
    Alias("use_sapo_loss", "AReaL", f"{ACTOR}.policy_loss.loss_mode", areal_values.sapo),
    Alias("sapo_tau_pos", "AReaL", f"{ACTOR}.policy_loss.tau_pos"),
    Alias("sapo_tau_neg", "AReaL", f"{ACTOR}.policy_loss.tau_neg"),
    Alias("discount", "AReaL", "algorithm.gamma"),
    Alias("gae_lambda", "AReaL", "algorithm.lam"),
    Alias("ppo_n_minibatches", "AReaL", f"{ACTOR}.ppo_mini_batch_size", deferred="Mini-batches per rollout batch."),
    Alias("recompute_logprob", "AReaL", f"{ACTOR}.old_log_prob_source", values.old_log_probs),
    Alias("entropy_coeff", "AReaL", f"{ACTOR}.entropy_coeff"),
    Alias("overlong_reward_penalty", "AReaL", f"{OVERLONG}.enable", values.overlong_penalty),
    Alias("overlong_tokens", "AReaL", f"{OVERLONG}.len"),
    Alias("overlong_penalty_factor", "AReaL", f"{OVERLONG}.penalty_factor"),
)

ALIASES = (
    *(alias for alias in _AREAL_ACTOR if alias.name != "group_size" and "." not in alias.name),
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
    Alias("actor.attn_impl", "AReaL", f"{MODEL}.attn_implementation", values.attention),
    Alias("actor.optimizer.beta1", "AReaL", f"{ACTOR}.optim.betas", deferred="AdamW's decay rate of the first moment."),
    Alias(
        "actor.optimizer.beta2", "AReaL", f"{ACTOR}.optim.betas", deferred="AdamW's decay rate of the second moment."
    ),
    Alias("critic.optimizer.beta1", "AReaL", "critic.optim.betas", deferred="AdamW's decay rate of the first moment."),
    Alias("critic.optimizer.beta2", "AReaL", "critic.optim.betas", deferred="AdamW's decay rate of the second moment."),
    Alias("actor.lora_rank", "AReaL", f"{MODEL}.lora_rank"),
    Alias("actor.lora_alpha", "AReaL", f"{MODEL}.lora_alpha"),
    Alias("actor.target_modules", "AReaL", f"{MODEL}.target_modules", areal_values.modules),
    Alias("critic.path", "AReaL", "critic.model.path", areal_values.critic),
    Alias("critic.eps_clip", "AReaL", "critic.cliprange_value"),
    Alias("critic.mb_spec.max_tokens_per_mb", "AReaL", "critic.ppo_max_token_len_per_gpu"),
    Alias("critic.optimizer", "AReaL", "critic.optim.lr", areal_values.critic_optimizer),
    *(
        Alias(f"critic.optimizer.{name}", "AReaL", f"critic.optim.{key}")
        for name, key in (
            *(
                ("lr", "lr"),
                ("weight_decay", "weight_decay"),
                ("eps", "eps"),
                ("lr_scheduler_type", "lr_scheduler_type"),
            ),
            ("warmup_steps_proportion", "lr_warmup_steps_ratio"),
        )
    ),
    Alias("critic.optimizer.gradient_clipping", "AReaL", "critic.grad_clip"),
    Alias("ref.mb_spec.max_tokens_per_mb", "AReaL", "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu"),
    Alias("rollout.backend", "AReaL", f"{ROLLOUT}.name", areal_values.rollout_backend),
    Alias("vllm.gpu_memory_utilization", "AReaL", f"{ROLLOUT}.gpu_memory_utilization"),
    Alias("vllm.max_model_len", "AReaL", f"{ROLLOUT}.max_model_len"),
    Alias("vllm.max_num_seqs", "AReaL", f"{ROLLOUT}.max_num_seqs"),
    Alias("vllm.enforce_eager", "AReaL", f"{ROLLOUT}.enforce_eager"),
    Alias("gconfig.ignore_eos", "AReaL", f"{ROLLOUT}.ignore_eos"),
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

# Keys, or sections with all their keys, that have no effect, and why.
_PLACES = "devices are set by trainer.nnodes, trainer.n_gpus_per_node and actor.strategy"
_ENGINE = "a run starts its engines itself; see rollout.name and rollout.num_workers"
NO_EFFECT = {
    "enable_offload": "actor.fsdp_config has the keys of offloading",
    "scheduler": "start with `gspo train` or `ray job submit`",
    "perf_tracer": "`timing_s/*` has the time of each stage",
    "dynamic_bs": "every step trains on data.train_batch_size groups",
    "vllm": _ENGINE,
    **{
        f"{part}.{name}": reason
        for part in ("actor", "ref", "critic")
        for name, reason in {
            "backend": _PLACES,
            "scheduling_spec": _PLACES,
            "scheduling_strategy": _PLACES,
            "weight_update_mode": "weights reach engines through shared memory, or with Ray its object store",
            "init_from_scratch": "models are loaded from their folder",
            "disable_dropout": "dropout is always off in reinforcement learning",
            "is_critic": "it is a critic because of where it stands",
            "fsdp": "actor.fsdp_config has the keys of sharding",
            "archon": "models are sharded with FSDP2",
            "mb_spec": "micro-batches are filled by tokens",
            "pad_to_maximum": "sequences are packed without padding",
            "use_lora": "true needs no key: a lora_rank above 0 switches LoRA on",
            "grad_reduce_dtype": "gradients are summed in float32",
            "log_agent_stats": "metrics are written in every step",
            "log_agent_stats_keys": "metrics are written in every step",
        }.items()
    },
    "actor.max_new_tokens": "it follows gconfig.max_new_tokens",
    "actor.reward_norm": "groups are those of gconfig.n_samples",
    "actor.adv_norm": "groups are those of gconfig.n_samples",
    "ref.optimizer": "the reference is not trained",
    "ref.dtype": "it follows actor.dtype",
    "ref.attn_impl": "it follows actor.attn_impl",
    "critic.dtype": "it follows actor.dtype",
    "critic.attn_impl": "it follows actor.attn_impl",
    "critic.gradient_checkpointing": "it follows actor.gradient_checkpointing",
    "critic.ppo_n_minibatches": "it follows actor.ppo_n_minibatches",
    "critic.experiment_name": "the run's name is trainer.experiment_name",
    "critic.trial_name": "the run's name is trainer.experiment_name",
    **{
        f"rollout.{name}": _ENGINE
        for name in (
            *("queue_size", "fileroot", "dump_to_file", "enable_rollout_tracing", "consumer_batch_size"),
            *(
                "scheduling_spec",
                "scheduling_strategy",
                "tokenizer_path",
                "use_lora",
                "setup_timeout",
                "request_timeout",
            ),
            *("request_retries", "pause_grace_period", "schedule_policy", "check_trajectory_format", "openai"),
        )
    },
    "gconfig.lora_name": "the engine always gets the trainer's weights",
    "gconfig.use_beam_search": "tokens are sampled",
    "gconfig.max_tokens": "lengths are gconfig.max_new_tokens and train_dataset.max_length",
    "train_dataset.scheduling_spec": _PLACES,
    "valid_dataset.scheduling_spec": _PLACES,
    "valid_dataset.shuffle": "the order of held-out prompts does not change a result",
    "train_dataset.drop_last": "every step trains on a whole batch",
    "valid_dataset.drop_last": "all held-out prompts are evaluated",
    "valid_dataset.max_length": "it follows train_dataset.max_length",
    "actor.optimizer.offload": "actor.fsdp_config has the keys of offloading",
    "actor.optimizer.initial_loss_scale": "training needs no loss scale",
    "actor.optimizer.min_loss_scale": "training needs no loss scale",
    "actor.optimizer.loss_scale_window": "training needs no loss scale",
    "actor.optimizer.hysteresis": "training needs no loss scale",
    "trial_name": "the run's name is trainer.experiment_name",
    "allocation_mode": "devices are set by trainer.nnodes, trainer.n_gpus_per_node and rollout.tensor_model_parallel_size",
    "async_training": "use actor_rollout_ref.rollout.mode",
    "cluster.cluster_name": "runs are folders in trainer.default_local_dir",
    "cluster.name_resolve": "gspo has no name service",
    "launcher": "start with `gspo train` or `ray job submit`",
    "sglang": "the engines are native and vllm; see actor_rollout_ref.rollout.name",
    "server_only": "the trainer starts its engines itself",
    "stats_logger": "use trainer.logger",
    "checkpointer": "use trainer.save_freq",
    "saver": "use trainer.save_freq",
    "evaluator": "use trainer.test_freq",
    "recover": "use trainer.resume_mode",
    "rollout.experiment_name": "the run's name is trainer.experiment_name",
    "rollout.trial_name": "the run's name is trainer.experiment_name",
    "actor.experiment_name": "the run's name is trainer.experiment_name",
    "actor.trial_name": "the run's name is trainer.experiment_name",
    "ref.experiment_name": "the run's name is trainer.experiment_name",
    "ref.trial_name": "the run's name is trainer.experiment_name",
    "train_dataset.type": "the type of the data is recognised from its rows",
    "train_dataset.num_workers": "prompts are tokenized once, at the start",
    "train_dataset.pin_memory": "prompts are tokenized once, at the start",
    "valid_dataset.type": "the type of the data is recognised from its rows",
    "valid_dataset.num_workers": "prompts are tokenized once, at the start",
    "valid_dataset.pin_memory": "prompts are tokenized once, at the start",
}

FIXED: dict[str, Fixed] = {
    "gconfig.min_new_tokens": Fixed((0,), "responses may end at any time; remove it"),
    "gconfig.frequency_penalty": Fixed((0,), "sampling has no penalty; reward.repetition_penalty exists"),
    "actor.peft_type": Fixed(("lora",), "adapters are LoRA"),
    "actor.optimizer.type": Fixed(("adam", "adamw"), "the optimiser is AdamW; remove it"),
    "critic.optimizer.type": Fixed(("adam", "adamw"), "the optimiser is AdamW; remove it"),
    "actor.rejection_sampling.metric": Fixed(("ratio",), "the bound is one of the weight π_old/μ"),
    "actor.rejection_sampling.action": Fixed(("mask",), "set actor_rollout_ref.actor.behav_imp_weight_mode"),
    "actor.rejection_sampling.lower": Fixed((0,), "weights have an upper bound only; remove it"),
    "actor.m2_threshold": Fixed((), "the loss M2PO is not supported; remove it"),
    "actor.mask_no_eos_with_zero": Fixed(
        (False,), "set algorithm.mask_truncated=true, which leaves them out of the loss"
    ),
    "actor.prox_logp_method": Fixed(("recompute",), "set actor_rollout_ref.actor.old_log_prob_source"),
}
