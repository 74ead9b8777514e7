"""AReaL's keys: what each is here."""

from __future__ import annotations

from dataclasses import replace

from gspo.config.compat import alias_values as values
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

ALIASES = (
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

# Keys, or sections with all their keys, that have no effect, and why.
NO_EFFECT = {
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

FIXED: dict[str, Fixed] = {}
