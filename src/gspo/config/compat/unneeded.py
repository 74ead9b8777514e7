"""Keys of other systems that ask for nothing here: accepted with a warning that says why, never silently."""

from __future__ import annotations

UNNEEDED: dict[str, str] = {
    "defaults": "Hydra's defaults list is not composed; put every key in this file",
    "hydra": "there is no Hydra here",
    "data.return_raw_chat": "rows always keep their messages",
    "data.return_raw_input_ids": "rows always keep their token ids",
    "data.return_full_prompt": "rows always keep their prompt",
    "data.dataloader_num_workers": "prompts are tokenised once, at start",
    "data.filter_overlong_prompts_workers": "prompts are tokenised once, at start",
    "data.tokenizer": "the tokenizer is actor_rollout_ref.model.tokenizer_path",
    "actor_rollout_ref.hybrid_engine": "rollout.name, rollout.mode and rollout.num_workers say whether policy and engine share a process",
    "actor_rollout_ref.actor.use_fused_kernels": "the head is always chunked",
    "actor_rollout_ref.model.use_fused_kernels": "the head is always chunked",
    "actor_rollout_ref.model.use_shm": "models are read from where they are",
    "actor_rollout_ref.model.external_lib": "use trainer.plugins",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy": "every decoder layer is a shard",
    "actor_rollout_ref.ref.fsdp_config.wrap_policy": "every decoder layer is a shard",
    "actor_rollout_ref.actor.fsdp_config.forward_prefetch": "prefetch is always on",
    "actor_rollout_ref.actor.checkpoint": "a checkpoint always holds the whole state",
    "actor_rollout_ref.rollout.load_format": "the engine takes the trainer's weights",
    "actor_rollout_ref.rollout.disable_log_stats": "engine statistics are always in the metrics",
    "actor_rollout_ref.rollout.layered_summon_param": "the engine takes the trainer's weights",
    "actor_rollout_ref.rollout.multi_stage_wake_up": "memory is given back in one stage",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": "follows actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.ref.strategy": "follows actor.strategy",
    "critic.strategy": "follows actor.strategy",
    "critic.shuffle": "follows actor.shuffle",
    "critic.use_dynamic_bsz": "follows actor.use_dynamic_bsz",
    "critic.ulysses_sequence_parallel_size": "follows actor.ulysses_sequence_parallel_size",
    "reward.reward_manager.source": "managers are found by name",
    "reward_model.launch_reward_fn_async": "rewards always overlap with generation",
    "reward_model.strategy": "there is no reward model",
    "ray_kwargs": "Ray takes its settings from RAY_ADDRESS and `ray job submit`",
    "ray_init": "Ray takes its settings from RAY_ADDRESS and `ray job submit`",
    "trainer.balance_batch": "micro-batches are always balanced by tokens",
    "trainer.default_hdfs_dir": "runs are folders; mount what you need",
    "trainer.ray_wait_register_center_timeout": "there is no register centre",
    "trainer.val_only": "use `gspo eval`",
    "trainer.rollout_data_dir": "groups are always written into the run folder",
    "trainer.validation_data_dir": "evaluations are always written into the run folder",
    "trial_name": "the run's name is trainer.experiment_name",
    "allocation_mode": "the layout is trainer.nnodes, n_gpus_per_node and rollout.tensor_model_parallel_size",
    "async_training": "see actor_rollout_ref.rollout.mode",
    "cluster.cluster_name": "runs are folders under trainer.default_local_dir",
    "cluster.name_resolve": "there is no name service",
    "launcher": "start with `gspo train` or `ray job submit`",
    "sglang": "the engines are native and vllm",
    "server_only": "the engine runs with the trainer",
    "stats_logger": "see trainer.logger",
    "checkpointer": "see trainer.save_freq",
    "saver": "see trainer.save_freq",
    "evaluator": "see trainer.test_freq",
    "recover": "see trainer.resume_mode",
    "rollout.experiment_name": "the run's name is trainer.experiment_name",
    "rollout.trial_name": "the run's name is trainer.experiment_name",
    "actor.experiment_name": "the run's name is trainer.experiment_name",
    "actor.trial_name": "the run's name is trainer.experiment_name",
    "ref.experiment_name": "the run's name is trainer.experiment_name",
    "ref.trial_name": "the run's name is trainer.experiment_name",
    "train_dataset.type": "the kind of data follows from its rows",
    "train_dataset.num_workers": "prompts are tokenised once, at start",
    "train_dataset.pin_memory": "prompts are tokenised once, at start",
    "valid_dataset.type": "the kind of data follows from its rows",
    "valid_dataset.num_workers": "prompts are tokenised once, at start",
    "valid_dataset.pin_memory": "prompts are tokenised once, at start",
    "logging_steps": "every step is logged",
    "remove_unused_columns": "reward functions get every column",
    "disable_dropout": "dropout is always off in reinforcement learning",
    "log_completions": "groups are always written into the run folder",
}


def why_unneeded(name: str) -> str | None:
    """Why a key (or the section it lies in) asks for nothing here, or None."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        reason = UNNEEDED.get(".".join(parts[:end]))
        if reason is not None:
            return reason
    return None
