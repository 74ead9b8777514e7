"""Keys of other systems that have no effect here. They are accepted with a warning that says why."""

from __future__ import annotations

UNNEEDED: dict[str, str] = {
    "defaults": "Hydra's defaults list is not supported; put every key in this file",
    "hydra": "gspo does not use Hydra",
    "data.return_raw_chat": "rows always keep their messages",
    "data.return_raw_input_ids": "rows always keep their token ids",
    "data.return_full_prompt": "rows always keep their prompt",
    "data.dataloader_num_workers": "prompts are tokenized once, at the start",
    "data.filter_overlong_prompts_workers": "prompts are tokenized once, at the start",
    "data.tokenizer": "the tokenizer is actor_rollout_ref.model.tokenizer_path",
    "actor_rollout_ref.hybrid_engine": "rollout.name, rollout.mode and rollout.num_workers decide whether policy and engine share a process",
    "actor_rollout_ref.actor.use_fused_kernels": "log-probs are always computed in chunks",
    "actor_rollout_ref.model.use_fused_kernels": "log-probs are always computed in chunks",
    "actor_rollout_ref.model.use_shm": "models are read from the folder they are in",
    "actor_rollout_ref.model.external_lib": "use trainer.plugins",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy": "every decoder layer is sharded by itself",
    "actor_rollout_ref.ref.fsdp_config.wrap_policy": "every decoder layer is sharded by itself",
    "actor_rollout_ref.actor.fsdp_config.forward_prefetch": "prefetching is always on",
    "actor_rollout_ref.actor.checkpoint": "a checkpoint always contains the whole state",
    "actor_rollout_ref.rollout.load_format": "the engine always gets the trainer's weights",
    "actor_rollout_ref.rollout.disable_log_stats": "the metrics always include engine statistics",
    "actor_rollout_ref.rollout.layered_summon_param": "the engine always gets the trainer's weights",
    "actor_rollout_ref.rollout.multi_stage_wake_up": "the engine always wakes up in one stage",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": "follows actor.ulysses_sequence_parallel_size",
    "actor_rollout_ref.ref.strategy": "follows actor.strategy",
    "critic.strategy": "follows actor.strategy",
    "critic.shuffle": "follows actor.shuffle",
    "critic.use_dynamic_bsz": "follows actor.use_dynamic_bsz",
    "critic.ulysses_sequence_parallel_size": "follows actor.ulysses_sequence_parallel_size",
    "reward.reward_manager.source": "reward managers are selected by name",
    "reward_model.launch_reward_fn_async": "rewards are always computed during generation",
    "reward_model.strategy": "trained reward models are not supported",
    "ray_kwargs": "Ray is configured by RAY_ADDRESS and `ray job submit`",
    "ray_init": "Ray is configured by RAY_ADDRESS and `ray job submit`",
    "trainer.balance_batch": "micro-batches are always balanced by tokens",
    "trainer.default_hdfs_dir": "runs are local folders",
    "trainer.ray_wait_register_center_timeout": "gspo has no register center",
    "trainer.val_only": "use `gspo eval`",
    "trainer.rollout_data_dir": "groups are written to the run folder unless trainer.save_groups is false",
    "trainer.validation_data_dir": "evaluations are always written to the run folder",
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
    "logging_steps": "every step is logged",
    "remove_unused_columns": "reward functions always get every column",
    "disable_dropout": "dropout is always off in reinforcement learning",
    "log_completions": "groups are written to the run folder unless trainer.save_groups is false",
}


def why_unneeded(name: str) -> str | None:
    """Why a key, or the section it is in, has no effect here; None for any other name."""
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        reason = UNNEEDED.get(".".join(parts[:end]))
        if reason is not None:
            return reason
    return None
