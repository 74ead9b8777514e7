"""Every value that a converter of another system's key distinguishes, and what the config must then hold."""

from __future__ import annotations

import inspect
import json

import pytest

from gspo.config import ConfigErrors, load
from gspo.config.compat import alias_values, areal_values, trl_values
from gspo.config.compat.aliases import aliases

A, M, R = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
STD, LEVEL = "algorithm.norm_adv_by_std_in_grpo", "algorithm.std_level"
LOSS, ESTIMATOR = f"{A}.policy_loss.loss_mode", "algorithm.adv_estimator"
WEIGHT = f"{A}.behav_imp_weight_mode"
CORRECTION = "algorithm.rollout_correction"

# (name, value, what the config must then hold): the values of each name that mean different things
CASES: list[tuple[str, object, dict[str, object]]] = [
    ("use_wandb", False, {"trainer.logger": ["console"]}),
    ("use_wandb", "yes", {"trainer.logger": ["console", "wandb"]}),
    # verl
    ("trainer.resume_from_path", None, {"trainer.resume_mode": "auto"}),
    ("trainer.resume_from_path", False, {"trainer.resume_mode": "auto"}),
    ("data.train_max_samples", 64, {"data.num_train_samples": 64}),
    ("data.train_max_samples", None, {"data.num_train_samples": None}),
    ("data.val_max_samples", -1, {"data.num_val_samples": None}),
    (f"{A}.fsdp_config.strategy", "fsdp2", {f"{A}.strategy": "fsdp2"}),
    (f"{A}.fsdp_config.strategy", "megatron", {f"{A}.strategy": "fsdp2"}),
    (f"{M}.torch_dtype", "torch.float16", {f"{M}.dtype": "float16"}),
    (f"{M}.torch_dtype", "fp32", {f"{M}.dtype": "float32"}),
    (f"{M}.override_config.attn_implementation", "flash_attention_3", {f"{M}.attn_implementation": None}),
    (f"{M}.lora.exclude_modules", ["lm_head"], {f"{M}.exclude_modules": ["lm_head"]}),
    (f"{CORRECTION}.rollout_is", None, {f"{A}.use_decoupled_loss": False}),
    (f"{CORRECTION}.rollout_is", "sequence", {WEIGHT: "sequence_product_truncate", f"{A}.behav_imp_weight_cap": 2.0}),
    (f"{CORRECTION}.rollout_is_threshold", None, {f"{A}.behav_imp_weight_cap": None}),
    (f"{CORRECTION}.bypass_mode", False, {f"{A}.old_log_prob_source": "first_pass"}),
    # AReaL
    ("eps_clip", 0, {LOSS: "gpg"}),
    ("kl_ctl", 0, {"algorithm.use_kl_in_reward": False}),
    ("recompute_logprob", True, {f"{A}.old_log_prob_source": "recompute"}),
    ("actor.reward_norm.mean_level", "batch", {ESTIMATOR: "reinforce_plus_plus"}),
    ("actor.reward_norm.mean_level", None, {ESTIMATOR: "reinforce_plus_plus"}),
    ("actor.reward_norm.mean_leave1out", False, {ESTIMATOR: "grpo"}),
    ("actor.reward_norm.std_level", "group", {STD: True, LEVEL: "group"}),
    ("actor.reward_norm.std_level", None, {STD: False}),
    ("actor.adv_norm.mean_level", None, {"algorithm.normalize_advantages": False}),
    ("actor.rejection_sampling.level", "token", {WEIGHT: "token_mask"}),
    ("use_sapo_loss", False, {LOSS: "gspo"}),
    ("rollout.backend", "vllm:d2", {f"{R}.name": "vllm", f"{R}.num_workers": 2, f"{R}.tensor_model_parallel_size": 1}),
    ("actor.target_modules", ["q_proj"], {f"{M}.target_modules": ["q_proj"]}),
    ("critic.optimizer", {"beta2": 0.95}, {"critic.optim.betas": [0.9, 0.95]}),
    (
        "critic.optimizer",
        {"beta1": 0.8, "weight_decay": 0.2, "eps": 1e-6, "gradient_clipping": 0.7, "type": "adam"},
        {"critic.optim.betas": [0.8, 0.999], "critic.optim.weight_decay": 0.2, "critic.grad_clip": 0.7},
    ),
    (
        "critic.optimizer",
        {"lr_scheduler_type": "cosine", "warmup_steps_proportion": 0.1, "min_lr_ratio": 0.3},
        {"critic.optim.lr_scheduler_type": "cosine", "critic.optim.min_lr_ratio": 0.3},
    ),
    ("saver.freq_steps", None, {"trainer.save_freq": -1}),
    ("evaluator.freq_steps", None, {"trainer.test_freq": -1}),
    ("recover.mode", "on", {"trainer.resume_mode": "auto"}),
    ("max_head_offpolicyness", 0, {f"{R}.mode": "sync"}),
    # TRL
    ("scale_rewards", "group", {STD: True, LEVEL: "group"}),
    ("scale_rewards", True, {STD: True, LEVEL: "group"}),
    ("scale_rewards", "batch", {STD: True, LEVEL: "batch"}),
    ("scale_rewards", False, {STD: False}),
    ("reward_funcs", "math", {"reward.functions": [{"name": "math"}]}),
    ("lr_scheduler_type", "constant_with_warmup", {f"{A}.optim.lr_scheduler_type": "constant"}),
    ("lr_scheduler_type", "cosine", {f"{A}.optim.lr_scheduler_type": "cosine"}),
    ("warmup_steps", 5, {f"{A}.optim.lr_warmup_steps": 5}),
    ("warmup_steps", 0, {f"{A}.optim.lr_warmup_steps": 0}),
    ("warmup_steps", 1, {f"{A}.optim.lr_warmup_steps": 1}),  # a share is below 1
    ("max_steps", -1, {"trainer.total_training_steps": None}),
    ("eval_strategy", "steps", {"trainer.val_after_train": True}),
    ("save_strategy", "steps", {"trainer.save_freq": "auto"}),
    ("vllm_mode", "colocate", {f"{R}.free_cache_engine": True}),
    ("vllm_importance_sampling_mode", "token_mask", {WEIGHT: "token_mask"}),
    ("vllm_importance_sampling_mode", "token_truncate", {WEIGHT: "token_truncate"}),
    ("vllm_importance_sampling_mode", "sequence_truncate", {WEIGHT: "sequence_product_truncate"}),
    ("model_init_kwargs", {"torch_dtype": "torch.bfloat16", "device_map": "auto"}, {f"{M}.dtype": "bfloat16"}),
    ("model_init_kwargs", {"attn_implementation": "sdpa"}, {f"{M}.attn_implementation": "sdpa"}),
    ("model_init_kwargs", {"trust_remote_code": True}, {f"{M}.trust_remote_code": True}),
    ("fp16", False, {f"{M}.dtype": "auto"}),
    ("bf16", False, {f"{M}.dtype": "float32"}),
    ("use_cpu", False, {"trainer.device": "auto"}),
    ("use_vllm", False, {f"{R}.name": "native"}),
    ("resume_from_checkpoint", True, {"trainer.resume_mode": "auto"}),
    ("resume_from_checkpoint", False, {"trainer.resume_mode": "auto"}),
    ("report_to", "none", {"trainer.logger": ["console"]}),
    ("report_to", ["wandb", "tensorboard"], {"trainer.logger": ["console", "wandb", "tensorboard"]}),
    ("max_tool_calling_iterations", None, {f"{R}.multi_turn.max_assistant_turns": None}),
]
REFUSED = (
    (f"{CORRECTION}.rollout_is", "tokens"),
    (f"{CORRECTION}.rollout_is_threshold", "0.5_5.0"),
    ("rollout.backend", "trtllm:d1"),
    ("actor.rejection_sampling.level", "batch"),
    ("actor.adv_norm.mean_level", "group"),
    ("reward_funcs", []),
    ("lr_scheduler_type", "polynomial"),
    ("vllm_mode", "both"),
    ("model_init_kwargs", {"quantization_config": 4}),
    ("report_to", "all"),
    ("eval_strategy", "epoch"),
)


@pytest.mark.parametrize(("name", "value", "expected"), CASES)
def test_a_value_of_another_system_means_this_here(name, value, expected):
    written = value if isinstance(value, str) else json.dumps(value)
    resolved = load(overrides=[f"{M}.path=org/model", f"{name}={written}"])
    assert {key: resolved.get(key) for key in expected} == expected


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_value_that_means_nothing_here_is_refused_with_the_key_that_would(name, value):
    written = value if isinstance(value, str) else json.dumps(value)
    with pytest.raises(ConfigErrors) as caught:
        load(overrides=[f"{M}.path=org/model", f"{name}={written}"])
    (problem,) = caught.value.problems
    assert problem.key == name and aliases()[name].target in problem.remedy


def test_every_converter_has_cases():
    """Those of one kind of value are in `test_aliases`, that of a penalty of several keys in `test_foreign_keys`."""
    tried = {id(aliases()[name].convert) for name, *_ in CASES}
    elsewhere = {alias_values.kl_in_loss, alias_values.never_greedy, alias_values.overlong_penalty}
    elsewhere |= {trl_values.loss_type, areal_values.critic}
    every = {
        function
        for module in (alias_values, areal_values, trl_values)
        for _, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and function in {a.convert for a in aliases().values()}
    }
    assert {function.__name__ for function in every - elsewhere if id(function) not in tried} == set()
