"""Every alias, with its value as it must arrive."""

from __future__ import annotations

import json
from typing import get_args, get_origin

import pytest

from gspo.config import ConfigErrors, load
from gspo.config.compat.aliases import aliases
from gspo.config.loading import tree

A = "actor_rollout_ref.actor"
M = "actor_rollout_ref.model"
R = "actor_rollout_ref.rollout"
F = "algorithm.filter_groups"
O = "reward_model.reward_kwargs.overlong_buffer_cfg"

# name → (value as typed, what the config must then hold)
CASES: dict[str, tuple[object, dict[str, object]]] = {
    "dataset": ("mixed", {"data.train_files": "mixed"}),
    "num_train_samples": (200, {"data.num_train_samples": 200}),
    "num_epochs": (3, {"trainer.total_epochs": 3, "trainer.total_training_steps": None}),
    "model_name": ("Qwen/Qwen2.5-7B-Instruct", {f"{M}.path": "Qwen/Qwen2.5-7B-Instruct"}),
    "group_size": (4, {f"{R}.n": 4}),
    "left_clip_range": (2e-4, {f"{A}.clip_ratio_low": 2e-4}),
    "right_clip_range": (5e-4, {f"{A}.clip_ratio_high": 5e-4}),
    "learning_rate": ("5e-7", {f"{A}.optim.lr": 5e-7}),
    "update_frequency": (2, {f"{A}.ppo_mini_batch_size": 16, "data.train_batch_size": 32}),
    "batch_size": (64, {"data.train_batch_size": 64}),
    "mini_batch_size": (4, {f"{A}.ppo_mini_batch_size": 4}),
    "max_length": (100, {"data.max_response_length": 100}),
    "use_wandb": (True, {"trainer.logger": ["console", "wandb"]}),
    "seed": (7, {"trainer.seed": 7, "data.seed": None}),
    "output_dir": ("out", {"trainer.default_local_dir": "out"}),
    "n_resp_per_prompt": (16, {f"{R}.n": 16}),
    "rollout_mode": ("async", {f"{R}.mode": "async"}),
    "rollout_engine": ("vllm", {f"{R}.name": "vllm"}),
    "loss_mode": ("cispo", {f"{A}.policy_loss.loss_mode": "cispo", f"{A}.importance_sampling_level": "token"}),
    "temperature": (0.7, {f"{R}.temperature": 0.7, f"{R}.val_kwargs.temperature": 1.0}),
    "top_p": (0.9, {f"{R}.top_p": 0.9}),
    "top_k": (50, {f"{R}.top_k": 50}),
    f"{A}.optim.warmup_style": ("cosine", {f"{A}.optim.lr_scheduler_type": "cosine"}),
    "critic.optim.warmup_style": ("cosine", {"critic.optim.lr_scheduler_type": "cosine"}),
    "trainer.max_checkpoints_to_keep": (5, {"trainer.max_actor_ckpt_to_keep": 5}),
    "trainer.resume_from_path": (".", {"trainer.resume_mode": "."}),
    "data.reward_fn_key": ("source", {"data.data_source_key": "source"}),
    "data.answer_key": ("solution", {"data.ground_truth_key": "solution"}),
    "data.dataset": ("math", {"data.train_files": "math"}),
    "data.train_max_samples": (64, {"data.num_train_samples": 64}),
    "data.val_max_samples": (64, {"data.num_val_samples": 64}),
    "data.trust_remote_code": (True, {f"{M}.trust_remote_code": True}),
    f"{A}.ppo_micro_batch_size": (2, {f"{A}.ppo_micro_batch_size_per_gpu": 2, f"{A}.use_dynamic_bsz": False}),
    "reward.custom_reward_function.path": ("my.rewards", {"custom_reward_function.path": "my.rewards"}),
    "reward.custom_reward_function.name": ("score_it", {"custom_reward_function.name": "score_it"}),
    "reward.custom_reward_function.reward_kwargs": ({"a": 1}, {"custom_reward_function.reward_kwargs": {"a": 1}}),
    "reward.reward_manager": ("dapo", {"reward_model.reward_manager": "dapo"}),
    "reward.reward_manager.name": ("dapo", {"reward_model.reward_manager": "dapo"}),
    "reward.reward_model.enable": (False, {"reward_model.enable": False}),
    "reward.reward_model.model_path": ("org/scores", {"reward_model.path": "org/scores"}),
    "reward_model.model.path": ("org/scores", {"reward_model.path": "org/scores"}),
    "reward_model.forward_max_token_len_per_gpu": (4096, {"reward_model.max_tokens_per_batch": 4096}),
    "actor_rollout_ref.ref.model.path": ("org/teacher", {"actor_rollout_ref.ref.path": "org/teacher"}),
    "reward_funcs": (
        ["math", "mine.py:score"],
        {"reward.functions": [{"name": "math"}, {"path": "mine.py", "name": "score"}]},
    ),
    "reward_weights": ([], {"reward.functions": []}),
    "reward.reward_kwargs.max_resp_len": (40, {"reward_model.reward_kwargs.max_resp_len": 40}),
    "reward.reward_kwargs.overlong_buffer_cfg.enable": (False, {f"{O}.enable": False}),
    "reward.reward_kwargs.overlong_buffer_cfg.len": (9, {f"{O}.len": 9}),
    "reward.reward_kwargs.overlong_buffer_cfg.penalty_factor": (0.5, {f"{O}.penalty_factor": 0.5}),
    "reward.reward_kwargs.overlong_buffer_cfg.log": (True, {f"{O}.log": True}),
    "reward_model.overlong_buffer.enable": (False, {f"{O}.enable": False}),
    "reward_model.overlong_buffer.len": (9, {f"{O}.len": 9}),
    "reward_model.overlong_buffer.penalty_factor": (0.5, {f"{O}.penalty_factor": 0.5}),
    "reward_model.overlong_buffer.log": (True, {f"{O}.log": True}),
    "reward_model.num_workers": (3, {"reward.num_workers": 3}),
    "importance_sampling_level": (
        "token",
        {f"{A}.importance_sampling_level": "token", f"{A}.policy_loss.loss_mode": "vanilla"},
    ),
    "dynamic_sampling": (False, {f"{F}.enable": False}),
    "use_decoupled_loss": (True, {f"{A}.use_decoupled_loss": True}),
    "behav_imp_weight_cap": (5.0, {f"{A}.behav_imp_weight_cap": 5.0}),
    "behav_imp_weight_mode": ("sequence_mask", {f"{A}.behav_imp_weight_mode": "sequence_mask"}),
    "eps_clip": (0.004, {f"{A}.clip_ratio": 0.004, f"{A}.clip_ratio_low": None, f"{A}.clip_ratio_high": None}),
    "eps_clip_higher": (0.006, {f"{A}.clip_ratio_high": 0.006}),
    "c_clip": (5.0, {f"{A}.clip_ratio_c": 5.0}),
    "kl_ctl": (0.05, {"algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 0.05}),
    "discount": (0.9, {"algorithm.gamma": 0.9}),
    "gae_lambda": (0.95, {"algorithm.lam": 0.95}),
    "ppo_n_minibatches": (8, {f"{A}.ppo_mini_batch_size": 4, "data.train_batch_size": 32}),
    "recompute_logprob": (False, {f"{A}.old_log_prob_source": "rollout"}),
    "entropy_coeff": (0.01, {f"{A}.entropy_coeff": 0.01}),
    "overlong_reward_penalty": (False, {f"{O}.enable": False}),
    "overlong_tokens": (9, {f"{O}.len": 9}),
    "overlong_penalty_factor": (0.5, {f"{O}.penalty_factor": 0.5}),
    "actor.group_size": (4, {f"{R}.n": 4}),
    "actor.path": ("org/model", {f"{M}.path": "org/model"}),
    "actor.dtype": ("bfloat16", {f"{M}.dtype": "bfloat16"}),
    "actor.gradient_checkpointing": (True, {f"{M}.enable_gradient_checkpointing": True}),
    "actor.temperature": (0.8, {f"{R}.temperature": 0.8}),
    "actor.optimizer.lr": (2e-6, {f"{A}.optim.lr": 2e-6}),
    "actor.optimizer.weight_decay": (0.02, {f"{A}.optim.weight_decay": 0.02}),
    "actor.optimizer.eps": (1e-7, {f"{A}.optim.eps": 1e-7}),
    "actor.optimizer.gradient_clipping": (0.5, {f"{A}.grad_clip": 0.5}),
    "actor.optimizer.lr_scheduler_type": ("cosine", {f"{A}.optim.lr_scheduler_type": "cosine"}),
    "actor.optimizer.warmup_steps_proportion": (0.1, {f"{A}.optim.lr_warmup_steps_ratio": 0.1}),
    "actor.optimizer.min_lr_ratio": (0.2, {f"{A}.optim.min_lr_ratio": 0.2}),
    "actor.mb_spec.max_tokens_per_mb": (4096, {f"{A}.ppo_max_token_len_per_gpu": 4096}),
    "ref.path": ("org/ref", {"actor_rollout_ref.ref.path": "org/ref"}),
    "max_head_offpolicyness": (2, {f"{R}.max_head_offpolicyness": 2, f"{R}.mode": "async"}),
    "rollout.max_head_offpolicyness": (0, {f"{R}.max_head_offpolicyness": 0, f"{R}.mode": "sync"}),
    "rollout.max_concurrent_rollouts": (64, {f"{R}.max_concurrent_rollouts": 64}),
    "gconfig.n_samples": (4, {f"{R}.n": 4}),
    "gconfig.max_new_tokens": (40, {"data.max_response_length": 40}),
    "gconfig.temperature": (0.8, {f"{R}.temperature": 0.8}),
    "gconfig.top_p": (0.95, {f"{R}.top_p": 0.95}),
    "gconfig.top_k": (20, {f"{R}.top_k": 20}),
    "gconfig.greedy": (False, {f"{R}.temperature": 1.0}),
    "train_dataset.path": ("gsm8k", {"data.train_files": "gsm8k"}),
    "train_dataset.batch_size": (64, {"data.train_batch_size": 64}),
    "train_dataset.shuffle": (False, {"data.shuffle": False}),
    "train_dataset.max_length": (64, {"data.max_prompt_length": 64}),
    "valid_dataset.path": ("gsm8k", {"data.val_files": "gsm8k"}),
    "valid_dataset.batch_size": (64, {"data.val_batch_size": 64}),
    "experiment_name": ("try", {"trainer.experiment_name": "try"}),
    "total_train_epochs": (2, {"trainer.total_epochs": 2}),
    "total_train_steps": (9, {"trainer.total_training_steps": 9}),
    "tokenizer_path": ("org/tok", {f"{M}.tokenizer_path": "org/tok"}),
    "saver.freq_steps": (10, {"trainer.save_freq": 10}),
    "evaluator.freq_steps": (10, {"trainer.test_freq": 10}),
    "recover.mode": ("disabled", {"trainer.resume_mode": "disable"}),
    "cluster.n_nodes": (1, {"trainer.nnodes": 1}),
    "cluster.n_gpus_per_node": (1, {"trainer.n_gpus_per_node": 1}),
    "cluster.fileroot": ("out", {"trainer.default_local_dir": "out"}),
    "epsilon": (3e-3, {f"{A}.clip_ratio": 3e-3, f"{A}.clip_ratio_low": None, f"{A}.clip_ratio_high": None}),
    "epsilon_high": (4e-3, {f"{A}.clip_ratio_high": 4e-3}),
    "delta": (4.0, {f"{A}.clip_ratio_c": 4.0}),
    "num_generations": (16, {f"{R}.n": 16}),
    "loss_type": ("dr_grpo", {f"{A}.loss_agg_mode": "seq-mean-token-sum-norm"}),
    "beta": (0.04, {f"{A}.use_kl_loss": True, f"{A}.kl_loss_coef": 0.04}),
    "scale_rewards": ("none", {"algorithm.norm_adv_by_std_in_grpo": False}),
    "num_iterations": (2, {f"{A}.ppo_epochs": 2}),
    "steps_per_generation": (8, {f"{A}.ppo_mini_batch_size": 4, "data.train_batch_size": 32}),
    "gradient_accumulation_steps": (8, {f"{A}.ppo_mini_batch_size": 32, "data.train_batch_size": 32}),
    "per_device_train_batch_size": (
        16,
        {f"{A}.ppo_micro_batch_size_per_gpu": 16, f"{A}.ppo_mini_batch_size": 2, "data.train_batch_size": 2},
    ),
    "generation_batch_size": (64, {"data.train_batch_size": 8}),
    "max_tool_calling_iterations": (2, {"actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 3}),
    "max_completion_length": (40, {"data.max_response_length": 40}),
    "max_prompt_length": (40, {"data.max_prompt_length": 40}),
    "num_train_epochs": (2, {"trainer.total_epochs": 2}),
    "max_steps": (9, {"trainer.total_training_steps": 9}),
    "max_grad_norm": (0.5, {f"{A}.grad_clip": 0.5}),
    "lr_scheduler_type": ("cosine", {f"{A}.optim.lr_scheduler_type": "cosine"}),
    "warmup_ratio": (0.1, {f"{A}.optim.lr_warmup_steps_ratio": 0.1}),
    "warmup_steps": (5, {f"{A}.optim.lr_warmup_steps": 5}),
    "weight_decay": (0.02, {f"{A}.optim.weight_decay": 0.02}),
    "gradient_checkpointing": (True, {f"{M}.enable_gradient_checkpointing": True}),
    "bf16": (True, {f"{M}.dtype": "bfloat16"}),
    "use_vllm": (True, {f"{R}.name": "vllm"}),
    "vllm_gpu_memory_utilization": (0.7, {f"{R}.gpu_memory_utilization": 0.7}),
    "vllm_tensor_parallel_size": (1, {f"{R}.tensor_model_parallel_size": 1}),
    "report_to": ("tensorboard", {"trainer.logger": ["console", "tensorboard"]}),
    "run_name": ("try", {"trainer.experiment_name": "try"}),
    "save_steps": (10, {"trainer.save_freq": 10}),
    "save_total_limit": (4, {"trainer.max_actor_ckpt_to_keep": 4}),
    "eval_steps": (10, {"trainer.test_freq": 10}),
    "model_name_or_path": ("org/model", {f"{M}.path": "org/model"}),
    "dataset_name": ("gsm8k", {"data.train_files": "gsm8k"}),
    "lora_r": (8, {f"{M}.lora_rank": 8}),
    "lora_target_modules": (["q_proj"], {f"{M}.target_modules": ["q_proj"]}),
}
CASES |= {
    "lr_scheduler_type": ("linear", {f"{A}.optim.lr_scheduler_type": "linear"}),
    "warmup_steps": (0.1, {f"{A}.optim.lr_warmup_steps_ratio": 0.1}),
    "adam_beta1": (0.5, {f"{A}.optim.betas": [0.5, 0.999]}),
    "adam_beta2": (0.95, {f"{A}.optim.betas": [0.9, 0.95]}),
    "actor.optimizer.beta1": (0.5, {f"{A}.optim.betas": [0.5, 0.999]}),
    "actor.optimizer.beta2": (0.95, {f"{A}.optim.betas": [0.9, 0.95]}),
    "critic.optimizer.beta1": (0.5, {"critic.optim.betas": [0.5, 0.999]}),
    "critic.optimizer.beta2": (0.95, {"critic.optim.betas": [0.9, 0.95]}),
    "model_init_kwargs": ({"dtype": "bfloat16"}, {f"{M}.dtype": "bfloat16"}),
    "chat_template_kwargs": (
        {"enable_thinking": False},
        {"data.apply_chat_template_kwargs": {"enable_thinking": False}},
    ),
    "vllm.max_model_len": (2048, {f"{R}.max_model_len": 2048}),
    "vllm_max_model_length": (2048, {f"{R}.max_model_len": 2048}),
    "vllm_mode": ("server", {f"{R}.free_cache_engine": False}),
    "vllm_importance_sampling_mode": ("sequence_mask", {f"{A}.behav_imp_weight_mode": "sequence_product_mask"}),
    "eval_strategy": ("no", {"trainer.test_freq": -1, "trainer.val_before_train": False}),
    "save_strategy": ("no", {"trainer.save_freq": -1}),
    "fp16": (True, {f"{M}.dtype": "float16"}),
    "use_cpu": (True, {"trainer.device": "cpu"}),
    "resume_from_checkpoint": (".", {"trainer.resume_mode": "."}),
    "use_sapo_loss": (True, {f"{A}.policy_loss.loss_mode": "sapo"}),
    "actor.reward_norm.mean_level": ("group", {"algorithm.adv_estimator": "grpo"}),
    "actor.reward_norm.mean_leave1out": (True, {"algorithm.adv_estimator": "rloo"}),
    "actor.reward_norm.std_level": ("batch", {"algorithm.std_level": "batch"}),
    "actor.adv_norm.mean_level": ("batch", {"algorithm.normalize_advantages": True}),
    "actor.adv_norm.std_level": ("batch", {"algorithm.normalize_advantages": True}),
    "actor.rejection_sampling.level": ("sequence", {f"{A}.behav_imp_weight_mode": "sequence_mask"}),
    "actor.attn_impl": ("sdpa", {f"{M}.attn_implementation": "sdpa"}),
    "actor.target_modules": (["all-linear"], {f"{M}.target_modules": "all-linear"}),
    "critic.path": ("org/model", {"critic.model.path": "org/model", "algorithm.adv_estimator": "gae"}),
    "critic.optimizer": ({"lr": 1e-4}, {"critic.optim.lr": 1e-4}),
    "rollout.backend": ("sglang:d4t2", {f"{R}.name": "vllm", f"{R}.num_workers": 4}),
    "data.train_max_samples": (-1, {"data.num_train_samples": None}),
    f"{A}.fsdp_config.strategy": ("fsdp", {f"{A}.strategy": "fsdp2"}),
    f"{A}.fsdp_config.dtype": ("bfloat16", {f"{M}.dtype": "bfloat16"}),
    f"{M}.torch_dtype": ("bf16", {f"{M}.dtype": "bfloat16"}),
    f"{M}.override_config.attn_implementation": ("sdpa", {f"{M}.attn_implementation": "sdpa"}),
    f"{M}.lora.exclude_modules": ([], {f"{M}.exclude_modules": None}),
    "algorithm.rollout_correction.rollout_is": (
        "token",
        {
            f"{A}.use_decoupled_loss": True,
            f"{A}.behav_imp_weight_mode": "token_truncate",
            f"{A}.behav_imp_weight_cap": 2.0,
        },
    ),
    "algorithm.rollout_correction.rollout_is_threshold": (3, {f"{A}.behav_imp_weight_cap": 3.0}),
    "algorithm.rollout_correction.bypass_mode": (True, {f"{A}.old_log_prob_source": "rollout"}),
}


def _sample(leaf: tree.Leaf):
    """A value of a key that is not its default."""
    types = (leaf.type, *get_args(leaf.type))
    if leaf.info.choices:
        return next(c for c in leaf.info.choices if c != leaf.default)
    if bool in types:
        return not leaf.default
    if int in types:
        return next(n for n in (1, 2) if n != leaf.default)
    if float in types:
        return next(x for x in (0.25, 1.5, 0.5) if x != leaf.default and leaf.info.violation(x) is None)
    return ["word"] if get_origin(leaf.type) is list else "word"


for _name, _case in list(CASES.items()):  # AReaL's keys stand at the top or under `actor:`
    if f"actor.{_name}" in aliases() and f"actor.{_name}" not in CASES:
        CASES[f"actor.{_name}"] = _case
for _alias in aliases().values():  # another name for a key, with the same values
    if _alias.name not in CASES and not (_alias.convert or _alias.deferred):
        _value = _sample(tree.leaves()[_alias.target])
        CASES[_alias.name] = (_value, {_alias.target: _value})

RECIPE = """
algorithm: {filter_groups: {enable: true}}
data: {train_batch_size: 32, max_response_length: 48}
actor_rollout_ref:
  actor: {ppo_mini_batch_size: 8, clip_ratio_low: 0.01, clip_ratio_high: 0.01}
  rollout: {n: 8}
trainer: {total_training_steps: 30}
"""


@pytest.fixture(autouse=True)
def fixed_recipe(tmp_path, monkeypatch):
    """The sizes that the cases were computed with; the shipped recipe may change."""
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE)
    monkeypatch.setattr("gspo.config.loading.sources.RECIPE", path)


def typed(value: object) -> str:
    """A value as one would type it."""
    return value if isinstance(value, str) else json.dumps(value)


def test_every_alias_has_a_case():
    assert set(CASES) == set(aliases())


@pytest.mark.parametrize("name", aliases())
def test_alias_arrives_as_an_override(name):
    value, expected = CASES[name]
    resolved = load(overrides=[f"{name}={typed(value)}"])
    for key, wanted in expected.items():
        assert resolved.get(key) == wanted, key
        assert type(resolved.get(key)) is type(wanted), key


@pytest.mark.parametrize("name", [a for a in aliases() if "." not in a])
def test_alias_arrives_as_a_flag_and_says_so(name):
    value, expected = CASES[name]
    resolved = load(flags=[f"--{name}", typed(value)])
    for key, wanted in expected.items():
        assert resolved.get(key) == wanted, key
    target = aliases()[name].target
    if target in expected and resolved.get(target) != tree.leaves()[target].default:
        assert f"--{name}" in resolved.origin(target)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("grpo", {f"{A}.loss_agg_mode": "seq-mean-token-mean"}),
        ("bnpo", {f"{A}.loss_agg_mode": "token-mean"}),
        ("dapo", {f"{A}.loss_agg_mode": "token-mean"}),
        ("cispo", {f"{A}.policy_loss.loss_mode": "cispo", f"{A}.loss_agg_mode": "token-mean"}),
        ("sapo", {f"{A}.policy_loss.loss_mode": "sapo"}),
    ],
)
def test_loss_type_of_trl(value, expected):
    resolved = load(overrides=[f"loss_type={value}"])
    assert {k: resolved.get(k) for k in expected} == expected


def test_beta_zero_switches_the_kl_term_off():
    assert load(overrides=["beta=0.0"]).config.actor_rollout_ref.actor.use_kl_loss is False


@pytest.mark.parametrize(
    ("flags", "train", "mini"),
    [
        ("--update_frequency 5", 40, 8),  # 32 does not divide by 5: mini-batches of 8 stay
        ("--update_frequency 2 --batch_size 10", 10, 5),
        ("--update_frequency 5 --mini_batch_size 3", 15, 3),
        ("--batch_size 8 --mini_batch_size 2", 8, 2),
        ("--batch_size 2", 2, 1),
        ("--batch_size 6", 6, 2),
        ("--num_train_samples 20", 20, 5),
    ],
)
def test_update_frequency_and_batch_sizes(flags, train, mini):
    config = load(flags=flags.split()).config
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (train, mini)


def test_update_frequency_that_cannot_be_is_refused():
    with pytest.raises(ConfigErrors, match="does not divide into 5 mini-batches"):
        load(flags=["--update_frequency", "5", "--batch_size", "8"])
    with pytest.raises(ConfigErrors, match="contradicts"):
        load(flags=["--update_frequency", "2", "--batch_size", "8", "--mini_batch_size", "2"])


def test_trl_batch_counts_responses():
    flags = (
        "--per_device_train_batch_size 8 --gradient_accumulation_steps 4 --steps_per_generation 16 --num_generations 8"
    )
    config = load(flags=flags.split()).config
    actor = config.actor_rollout_ref.actor
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size) == (16, 4)
    assert (actor.ppo_micro_batch_size_per_gpu, actor.use_dynamic_bsz) == (8, False)
    with pytest.raises(ConfigErrors, match="multiples of"):
        load(flags=["--per_device_train_batch_size", "3", "--num_generations", "8"])


def test_both_families_of_reward_keys_may_agree_but_not_contradict():
    same = load(overrides=["reward.reward_manager=dapo", "reward.reward_manager.name=dapo"])
    assert same.config.reward_model.reward_manager == "dapo"
    with pytest.raises(ConfigErrors, match="keep one of the two"):
        load(overrides=["reward.reward_manager=dapo", "reward.reward_manager.name=naive"])


def test_greedy_training_is_refused():
    with pytest.raises(ConfigErrors, match="teach nothing"):
        load(overrides=["gconfig.greedy=true"])


@pytest.mark.parametrize(
    "override", ["report_to=5", "beta=much", "loss_type=ppo", "scale_rewards=both", "use_wandb=maybe"]
)
def test_a_value_that_an_alias_cannot_take_is_refused_by_name(override):
    with pytest.raises(ConfigErrors, match=rf"{override.partition('=')[0]} = .*expected") as caught:
        load(overrides=[override])
    assert aliases()[override.partition("=")[0]].target in str(caught.value)


def test_recover_off_in_yaml_is_disable():
    assert load(overrides=["recover.mode=off"]).get("trainer.resume_mode") == "disable"


def test_half_precision_that_is_switched_off_is_float32():
    assert load(overrides=["bf16=false"]).get("actor_rollout_ref.model.dtype") == "float32"
