"""What follows from the values of other keys, case by case: what was set stays, what a recipe or nobody set gives way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gspo.config import ConfigErrors, load
from gspo.config.compat import alias_values, areal_values, trl_values
from gspo.config.loading import tree
from gspo.config.loading.derive import derive
from gspo.config.loading.settings import Layer, Origin, Setting, Settings
from gspo.config.problems import Problem

A, R, M, F = (
    "actor_rollout_ref.actor",
    "actor_rollout_ref.rollout",
    "actor_rollout_ref.model",
    "algorithm.filter_groups",
)
TRAIN, MINI, MICRO, N = (
    "data.train_batch_size",
    f"{A}.ppo_mini_batch_size",
    f"{A}.ppo_micro_batch_size_per_gpu",
    f"{R}.n",
)
SAMPLES, GEN, DYNAMIC = "data.num_train_samples", "data.gen_batch_size", f"{A}.use_dynamic_bsz"
LOSS, LEVEL, ESTIMATOR = f"{A}.policy_loss.loss_mode", f"{A}.importance_sampling_level", "algorithm.adv_estimator"
CLIP, LOW, HIGH, TARGET = f"{A}.clip_ratio", f"{A}.clip_ratio_low", f"{A}.clip_ratio_high", f"{A}.clip_target"
OLD, KL_LOSS, KL, DISTILL = (
    f"{A}.old_log_prob_source",
    f"{A}.use_kl_loss",
    "algorithm.use_kl_in_reward",
    "algorithm.distill_weight",
)
STEPS, EPOCHS, FILTER, METRIC = "trainer.total_training_steps", "trainer.total_epochs", f"{F}.enable", f"{F}.metric"
FUNCTIONS, JUDGE, BETAS = "reward.functions", "reward.judge.base_url", f"{A}.optim.betas"
NODES, GPUS, BACKEND, STRATEGY = "trainer.nnodes", "trainer.n_gpus_per_node", "trainer.backend", f"{A}.strategy"


def derived(
    recipe: Mapping[str, Any] = {},
    written: Mapping[str, Any] = {},
    later: Mapping[str, Any] = {},
    system: str | None = None,
) -> tuple[Settings, list[Problem]]:
    """The settings over the defaults: those of a recipe, those that somebody wrote, and names that count batches."""
    table, problems = Settings(), []
    for key, leaf in tree.leaves().items():
        table.put(key, leaf.default, Origin(Layer.DEFAULT, "default"))
    for values, layer in ((recipe, Layer.RECIPE), (written, Layer.FILE)):
        for key, value in values.items():
            table.put(key, value, Origin(layer, layer.name))
    deferred = [Setting(name, value, Origin(Layer.FLAG, f"flag --{name}")) for name, value in later.items()]
    derive(table, deferred, problems, system)
    return table, problems


SIZES = {TRAIN: 32, MINI: 8}
RECIPE_CLIP = {LOW: 0.01, HIGH: 0.02, TARGET: 0.1}
# (of a recipe, written, counts of other systems, what the table must then hold)
CASES: list[tuple[dict[str, Any], dict[str, Any], dict[str, Any], dict[str, Any]]] = [
    # distillation
    ({KL_LOSS: True, FILTER: True}, {ESTIMATOR: "opd"}, {}, {OLD: "recompute", KL_LOSS: False, FILTER: False}),
    ({KL_LOSS: True, FILTER: True}, {DISTILL: 0.1}, {}, {OLD: "recompute", KL_LOSS: False, FILTER: True}),
    ({KL_LOSS: True, FILTER: True}, {DISTILL: 0.0}, {}, {OLD: "first_pass", KL_LOSS: True, FILTER: True}),
    ({}, {ESTIMATOR: "opd", OLD: "rollout", KL_LOSS: True, FILTER: True}, {}, {OLD: "rollout", KL_LOSS: True, FILTER: True}),
    # the metric of the filter
    *[({METRIC: "acc"}, written, {}, {METRIC: "seq_reward"}) for written in (
        {JUDGE: "http://h"}, {"reward_model.enable": True}, {FUNCTIONS: [{"name": "a"}, {"judge": {}}]}, {FUNCTIONS: [{"model": "m"}]})],
    ({METRIC: "acc"}, {FUNCTIONS: [{"name": "judge"}, "x"]}, {}, {METRIC: "acc"}),
    ({}, {METRIC: "acc", JUDGE: "http://h"}, {}, {METRIC: "acc"}),
    # the loss of a method, its level and its clip range
    ({}, {ESTIMATOR: "grpo"}, {}, {LOSS: "vanilla", LEVEL: "token"}),
    ({}, {ESTIMATOR: "mine"}, {}, {LOSS: "gspo", LEVEL: "sequence"}),
    ({ESTIMATOR: "rloo"}, {}, {}, {LOSS: "gspo", LEVEL: "sequence"}),
    ({LOSS: "gspo"}, {ESTIMATOR: "grpo"}, {}, {LOSS: "gspo", LEVEL: "sequence"}),
    ({}, {ESTIMATOR: "grpo", LEVEL: "turn"}, {}, {LOSS: "gspo", LEVEL: "turn"}),
    ({}, {ESTIMATOR: "grpo", LOSS: "gspo_token"}, {}, {LOSS: "gspo_token", LEVEL: "sequence_token"}),
    *[({}, {LEVEL: level}, {}, {LOSS: loss}) for level, loss in (("token", "vanilla"), ("turn", "gspo"), ("sequence", "gspo"), ("sequence_token", "gspo_token"))],
    ({LOSS: "gspo"}, {LEVEL: "token"}, {}, {LOSS: "vanilla"}),
    ({}, {LOSS: "mine", LEVEL: "token"}, {}, {LOSS: "mine", LEVEL: "token"}),
    ({}, {LOSS: "mine"}, {}, {LOSS: "mine", LEVEL: None}),
    ({}, {LOSS: "vanilla", LEVEL: "turn"}, {}, {LOSS: "vanilla", LEVEL: "turn"}),
    (RECIPE_CLIP, {CLIP: 0.3}, {}, {CLIP: 0.3, LOW: None, HIGH: None, TARGET: 0.1}),
    (RECIPE_CLIP, {CLIP: 0.3, LOW: 0.2}, {}, {CLIP: 0.3, LOW: 0.2, HIGH: None}),
    ({**RECIPE_CLIP, CLIP: 0.3}, {}, {}, {CLIP: 0.3, LOW: 0.01, HIGH: 0.02}),
    (RECIPE_CLIP, {LOSS: "vanilla"}, {}, {LOW: None, HIGH: None, TARGET: None}),
    (RECIPE_CLIP, {ESTIMATOR: "grpo"}, {}, {LOW: None, HIGH: None, TARGET: None}),
    (RECIPE_CLIP, {LEVEL: "token"}, {}, {LOW: None, HIGH: None, TARGET: None}),
    (RECIPE_CLIP, {LOSS: "gspo_token"}, {}, RECIPE_CLIP),
    (RECIPE_CLIP, {LOSS: "vanilla", HIGH: 0.5}, {}, {LOW: None, HIGH: 0.5, TARGET: None}),
    ({**RECIPE_CLIP, LOSS: "vanilla"}, {}, {}, RECIPE_CLIP),
    # the length of a run
    ({STEPS: 9}, {EPOCHS: 2}, {}, {STEPS: None, EPOCHS: 2}),
    ({STEPS: 9, EPOCHS: 2}, {}, {}, {STEPS: 9}),
    ({}, {EPOCHS: 2, STEPS: 9}, {}, {STEPS: 9}),
    # the micro-batch
    ({}, {MICRO: 2}, {}, {DYNAMIC: False}),
    ({}, {MICRO: None}, {}, {DYNAMIC: True}),
    ({MICRO: 2}, {}, {}, {DYNAMIC: True}),
    ({}, {MICRO: 2, DYNAMIC: True}, {}, {DYNAMIC: True}),
    # mini-batches by their number
    (SIZES, {}, {"update_frequency": 2}, {TRAIN: 32, MINI: 16}),
    (SIZES, {}, {"update_frequency": 5}, {TRAIN: 40, MINI: 8}),
    (SIZES, {MINI: 3}, {"update_frequency": 5}, {TRAIN: 15, MINI: 3}),
    (SIZES, {TRAIN: 10}, {"update_frequency": 5}, {TRAIN: 10, MINI: 2}),
    (SIZES, {TRAIN: 10, MINI: 2}, {"ppo_n_minibatches": 5}, {TRAIN: 10, MINI: 2}),
    (SIZES, {}, {"update_frequency": "4.0"}, {TRAIN: 32, MINI: 8}),
    # TRL's sizes
    (SIZES, {N: 8}, {"gradient_accumulation_steps": 4}, {TRAIN: 32, MINI: 32, MICRO: None}),
    (SIZES, {N: 8}, {"steps_per_generation": 4}, {TRAIN: 32, MINI: 8}),
    (SIZES, {N: 8}, {"steps_per_generation": 12, "gradient_accumulation_steps": 4}, {TRAIN: 30, MINI: 10}),
    (SIZES, {N: 8}, {"steps_per_generation": 64}, {TRAIN: 64, MINI: 1}),
    (SIZES, {N: 4}, {"per_device_train_batch_size": 16}, {TRAIN: 4, MINI: 4, MICRO: 16, DYNAMIC: False}),
    (SIZES, {N: 4}, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 6}, {TRAIN: 12, MINI: 4, MICRO: 8}),
    (SIZES, {N: 4}, {"generation_batch_size": 64}, {TRAIN: 16, MINI: 16, MICRO: None}),
    (SIZES, {N: 4}, {"generation_batch_size": 64, "steps_per_generation": 4}, {TRAIN: 16, MINI: 4}),
    (SIZES, {N: 4}, {"generation_batch_size": 64, "steps_per_generation": 4, "gradient_accumulation_steps": 2}, {TRAIN: 16, MINI: 8}),
    (SIZES, {N: 4}, {"generation_batch_size": 64, "per_device_train_batch_size": 8}, {TRAIN: 16, MINI: 2, MICRO: 8}),
    # sizes that nobody set
    (SIZES, {SAMPLES: 32}, {}, {TRAIN: 32, MINI: 8}),
    (SIZES, {SAMPLES: 31}, {}, {TRAIN: 28, MINI: 7}),
    (SIZES, {SAMPLES: 4}, {}, {TRAIN: 4, MINI: 1}),
    (SIZES, {SAMPLES: 3}, {}, {TRAIN: 3, MINI: 1}),
    (SIZES, {SAMPLES: 1}, {}, {TRAIN: 1, MINI: 1}),
    (SIZES, {SAMPLES: 10, MINI: 4}, {}, {TRAIN: 8, MINI: 4}),
    (SIZES, {SAMPLES: 4, MINI: 4}, {}, {TRAIN: 4, MINI: 4}),
    (SIZES, {SAMPLES: 10, TRAIN: 20}, {}, {TRAIN: 20, MINI: 5}),
    (SIZES, {TRAIN: 16}, {}, {TRAIN: 16, MINI: 8}),
    (SIZES, {TRAIN: 6}, {}, {TRAIN: 6, MINI: 2}),  # of 2, 3 and 6 mini-batches three are closest to four
    (SIZES, {TRAIN: 10}, {}, {TRAIN: 10, MINI: 2}),
    (SIZES, {TRAIN: 14}, {}, {TRAIN: 14, MINI: 7}),
    (SIZES, {TRAIN: 49}, {}, {TRAIN: 49, MINI: 7}),
    (SIZES, {TRAIN: 11}, {}, {TRAIN: 11, MINI: 11}),
    (SIZES, {MINI: 5}, {}, {TRAIN: 30, MINI: 5}),
    (SIZES, {MINI: 40}, {}, {TRAIN: 40, MINI: 40}),
    (SIZES, {TRAIN: 10, MINI: 3}, {}, {TRAIN: 10, MINI: 3}),
    # the generation batch
    ({**SIZES, GEN: 64}, {TRAIN: 16}, {}, {GEN: None}),
    ({**SIZES, GEN: 64}, {SAMPLES: 10}, {}, {GEN: None}),
    ({**SIZES, GEN: 64}, {MINI: 4}, {}, {GEN: 64}),
    (SIZES, {TRAIN: 16, GEN: 64}, {}, {GEN: 64}),
    # decay rates and weights of other systems
    ({}, {}, {"adam_beta1": 0.5}, {BETAS: [0.5, 0.999]}),
    ({}, {}, {"adam_beta2": "5e-1"}, {BETAS: [0.9, 0.5]}),
    ({}, {BETAS: [0.1, 0.2]}, {"adam_beta2": 0.5}, {BETAS: [0.1, 0.5]}),
    ({}, {}, {"actor.optimizer.beta1": 0.5, "critic.optimizer.beta2": 0.4}, {BETAS: [0.5, 0.999], "critic.optim.betas": [0.9, 0.4]}),
    ({}, {FUNCTIONS: [{"name": "a"}, {"name": "b", "weight": 3}]}, {"reward_weights": [0.5, 2]}, {FUNCTIONS: [{"name": "a", "weight": 0.5}, {"name": "b", "weight": 2}]}),
    (SIZES, {FUNCTIONS: [{"name": "a"}]}, {"update_frequency": 2, "adam_beta1": 0.5, "reward_weights": [3]}, {FUNCTIONS: [{"name": "a", "weight": 3}], MINI: 16, BETAS: [0.5, 0.999]}),
    # what excludes a recipe's choice
    ({FILTER: True, KL_LOSS: True}, {N: 1}, {}, {FILTER: False, KL_LOSS: True}),
    ({FILTER: True, KL_LOSS: True}, {N: 2}, {}, {FILTER: True, KL_LOSS: True}),
    ({FILTER: True, KL_LOSS: True}, {KL: True}, {}, {FILTER: True, KL_LOSS: False}),
    ({}, {FILTER: True, N: 1, KL_LOSS: True, KL: True}, {}, {FILTER: True, KL_LOSS: True}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_follows_from_what_was_set(number: int) -> None:
    recipe, written, later, expected = CASES[number]
    table, problems = derived(recipe, written, later)
    assert {key: table[key].value for key in expected} == expected
    assert not [problem for problem in problems if problem.level == "error"]
    assert all(table[key].value == value for key, value in written.items() if key not in expected)


# (written, counts of other systems, the key of the problem, its text)
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({LOSS: "gspo", LEVEL: "token"}, {}, LEVEL, "which supports only sequence or turn"),
    ({}, {"update_frequency": 0}, "update_frequency", "a whole number of at least 1"),
    ({}, {"update_frequency": 2.5}, "update_frequency", "a whole number of at least 1"),
    ({}, {"per_device_train_batch_size": "x"}, "per_device_train_batch_size", "a whole number of at least 1"),
    ({TRAIN: 10}, {"update_frequency": 4}, "update_frequency", "does not divide into 4 mini-batches"),
    ({TRAIN: 10, MINI: 4}, {"update_frequency": 2}, "update_frequency", "which make 2.5 mini-batches"),
    ({}, {"steps_per_generation": 6, "gradient_accumulation_steps": 4}, "gradient_accumulation_steps", "6 forward passes do not divide into optimiser steps of 4"),
    ({N: 8}, {"per_device_train_batch_size": 4}, "per_device_train_batch_size", "4 responses per rollout batch and 4 per optimiser step must be multiples of"),
    ({N: 8}, {"per_device_train_batch_size": 4, "steps_per_generation": 2}, "steps_per_generation", "8 responses per rollout batch and 4 per optimiser step"),
    ({N: 8}, {"generation_batch_size": 12, "gradient_accumulation_steps": 2}, "gradient_accumulation_steps", "12 responses per rollout batch and 12 per optimiser step"),
    ({FUNCTIONS: [{"name": "a"}]}, {"reward_weights": [1, 2]}, "reward_weights", "expected a list of 1 numbers"),
    ({FUNCTIONS: [{"name": "a"}]}, {"reward_weights": 2}, "reward_weights", "expected a list of 1 numbers"),
    ({FUNCTIONS: [{"name": "a"}]}, {"reward_weights": ["x"]}, "reward_weights", "expected a list of 1 numbers"),
    ({FUNCTIONS: [{"name": "a"}]}, {"reward_weights": [float("nan")]}, "reward_weights", "expected a list of 1 numbers"),
    ({}, {"adam_beta1": "x"}, "adam_beta1", "expected a number in [0, 1)"),
    ({}, {"adam_beta2": [0.9]}, "adam_beta2", "expected a number in [0, 1)"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_contradicts_is_refused_by_name(number: int) -> None:
    written, later, key, text = REFUSED[number]
    _, (problem,) = derived(SIZES, written, later)
    assert (problem.level, problem.key) == ("error", key) and text in problem.message and problem.remedy


def test_what_is_switched_off_is_said_and_every_derived_value_gives_its_reason() -> None:
    table, problems = derived({FILTER: True, KL_LOSS: True}, {N: 1, KL: True})
    assert [(p.level, p.key) for p in problems] == [("warning", FILTER), ("warning", KL_LOSS)]
    assert table[FILTER].origin == Origin(
        Layer.DERIVED, f"because {N} = 1, and dynamic sampling compares the responses of a group"
    )
    table, _ = derived(SIZES, {}, {"update_frequency": 2})
    assert table[MINI].origin == Origin(Layer.FLAG, "flag --update_frequency: 2 mini-batches per rollout batch")
    assert table[TRAIN].origin == Origin(Layer.RECIPE, "RECIPE")


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ({}, {BACKEND: "local", STRATEGY: "local"}),
        ({NODES: 2, GPUS: 8}, {BACKEND: "ray", STRATEGY: "local"}),
        ({NODES: 1, GPUS: 8}, {BACKEND: "local", STRATEGY: "fsdp2"}),
        ({GPUS: 1}, {BACKEND: "local", STRATEGY: "local"}),
        ({NODES: 2, BACKEND: "local"}, {BACKEND: "local", STRATEGY: "local"}),
        ({GPUS: 2, STRATEGY: "local"}, {BACKEND: "local", STRATEGY: "local"}),
        ({GPUS: 2, BACKEND: "ray"}, {BACKEND: "ray", STRATEGY: "local"}),
    ],
)
def test_only_verls_program_uses_the_devices_it_is_given(written: dict[str, Any], expected: dict[str, Any]) -> None:
    table, _ = derived({}, written, system="verl")
    assert {key: table[key].value for key in expected} == expected
    for system in (None, "TRL", "verl's classes"):
        table, _ = derived({}, written, system=system)
        assert table[STRATEGY].value == written.get(STRATEGY, "local")


VALUES = [
    (alias_values.truth, "ON", True),
    (alias_values.truth, 1, True),
    (alias_values.truth, 0, False),
    (alias_values.truth, "No", False),
    (alias_values.kl_in_loss, "0.5", {KL_LOSS: True, f"{A}.kl_loss_coef": 0.5}),
    (alias_values.kl_in_loss, 0, {KL_LOSS: False, f"{A}.kl_loss_coef": 0.0}),
    (alias_values.kl_in_loss, -1, {KL_LOSS: False, f"{A}.kl_loss_coef": -1.0}),
    (alias_values.kl_in_reward, 0.1, {KL: True, "algorithm.kl_ctrl.kl_coef": 0.1}),
    (alias_values.off_policyness, 1, {f"{R}.max_head_offpolicyness": 1, f"{R}.mode": "async"}),
    (alias_values.train_samples, 0, {SAMPLES: None}),
    (alias_values.train_samples, 1, {SAMPLES: 1}),
    (alias_values.val_samples, 0, {"data.num_val_samples": None}),
    (alias_values.val_samples, 1, {"data.num_val_samples": 1}),
    (alias_values.loggers, None, {"trainer.logger": ["console"]}),
    (alias_values.loggers, ["none", "console", "wandb"], {"trainer.logger": ["console", "wandb"]}),
    (alias_values.tool_iterations, 0, {f"{R}.multi_turn.max_assistant_turns": 1}),
    (alias_values.resume_path, "", {}),
    (alias_values.resume_path, "x", {"trainer.resume_mode": "x"}),
    (alias_values.resume_checkpoint, None, {}),
    (alias_values.never_greedy, False, {}),
    (alias_values.overlong_penalty, "true", {"reward_model.reward_kwargs.overlong_buffer_cfg.enable": True, "reward_model.reward_manager": "dapo"}),
    (alias_values.rollout_is_threshold, "1.5", {f"{A}.behav_imp_weight_cap": 1.5}),
    (alias_values.logger_list, "wandb", (["wandb"], None)),
    (alias_values.logger_list, ["console", "mlflow", "file"], (["console"], "mlflow, file is not supported; metrics are in metrics.jsonl of the run folder")),
    (alias_values.logger_list, 3, (3, None)),
    (alias_values.own_strategy, "fsdp", ("fsdp2", None)),
    (alias_values.own_strategy, "veomni", ("fsdp2", "FSDP2 shards the models, not veomni")),
    (alias_values.own_strategy, "local", ("local", None)),
    (alias_values.engine_name, "hf", ("native", None)),
    (alias_values.engine_name, "trtllm", ("vllm", "vLLM generates, not trtllm")),
    (alias_values.engine_name, "mine", ("mine", None)),
    (alias_values.own_dtype, "torch.half", ("float16", None)),
    (alias_values.own_dtype, "float", ("float32", None)),
    (alias_values.own_dtype, None, (None, None)),
    (alias_values.own_attention, "sdpa", ("sdpa", None)),
    (alias_values.own_resume_mode, "auto", ("auto", None)),
    (alias_values.save_freq, 7, {"trainer.save_freq": 7}),
    (alias_values.test_freq, 7, {"trainer.test_freq": 7}),
    (areal_values.eps_clip, "0.2", {CLIP: "0.2"}),
    (areal_values.eps_clip, -1, {LOSS: "gpg"}),
    (areal_values.rollout_backend, "sglang:t4d2p1", {f"{R}.name": "vllm", f"{R}.num_workers": 2, f"{R}.tensor_model_parallel_size": 4}),
    (areal_values.rollout_backend, "vllm", {f"{R}.name": "vllm", f"{R}.num_workers": 1, f"{R}.tensor_model_parallel_size": 1}),
    (areal_values.critic_optimizer, {"lr": 1, "eps": 2, "other": 3}, {"critic.optim.lr": 1, "critic.optim.eps": 2}),
    (areal_values.critic_optimizer, {"beta1": 0.5}, {"critic.optim.betas": [0.5, 0.999]}),
    (areal_values.critic_optimizer, {"beta2": 0.5}, {"critic.optim.betas": [0.9, 0.5]}),
    (areal_values.modules, "all-linear", {f"{M}.target_modules": "all-linear"}),
    (areal_values.mean_level, "Group", {ESTIMATOR: "grpo"}),
    (areal_values.leave_one_out, "yes", {ESTIMATOR: "rloo"}),
    (trl_values.warmup, 0.999, {f"{A}.optim.lr_warmup_steps_ratio": 0.999}),
    (trl_values.warmup, "3.7", {f"{A}.optim.lr_warmup_steps": 3}),
    (trl_values.max_steps, 0, {}),
    (trl_values.max_steps, 1, {STEPS: 1}),
    (trl_values.reward_funcs, ["a:b.py:f", "math"], {FUNCTIONS: [{"path": "a:b.py", "name": "f"}, {"name": "math"}]}),
    (trl_values.reward_funcs, ["org/rm", "/a/b.py:f"], {FUNCTIONS: [{"model": "org/rm"}, {"path": "/a/b.py", "name": "f"}]}),
    (trl_values.eval_strategy, "no", {"trainer.test_freq": -1, "trainer.val_before_train": False, "trainer.val_after_train": False}),
    (trl_values.model_init, None, {}),
    (trl_values.model_init, {"torch_dtype": "fp16", "use_cache": False, "attn_implementation": "flash_attention_2"}, {f"{M}.dtype": "float16", f"{M}.attn_implementation": None}),
    (trl_values.scale_rewards, "True", {"algorithm.norm_adv_by_std_in_grpo": True, "algorithm.std_level": "group"}),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(VALUES)))
def test_a_value_of_another_system_as_ours(number: int) -> None:
    convert, value, expected = VALUES[number]
    assert convert(value) == expected


@pytest.mark.parametrize(
    ("convert", "value"),
    [
        (alias_values.truth, 2),
        (alias_values.number, None),
        (alias_values.loggers, "all"),
        (alias_values.loggers, ["a", 1]),
        (alias_values.never_greedy, "1"),
        (areal_values.critic_optimizer, [1]),
        (trl_values.reward_funcs, ["a", 1]),
        (trl_values.model_init, "x"),
    ],
)
def test_a_value_without_a_meaning_is_refused(convert: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="expected"):
        convert(value)


def test_decay_rates_of_a_later_layer_replace_those_of_another_system(tmp_path) -> None:
    file = tmp_path / "trl.yaml"
    file.write_text("adam_beta1: 0.5\n")
    assert load(file).get(BETAS) == [0.5, 0.999]
    assert load(file, ["adam_beta2=0.25"]).get(BETAS) == [0.5, 0.25]
    assert load(file, [f"{BETAS}=[0.1, 0.2]"]).get(BETAS) == [0.1, 0.2]


@pytest.mark.parametrize("entry", ["{name: exact, weight: a}", "{judge: {}, weight: a}", "{name: exact, weight: .nan}"])
def test_a_weight_that_is_no_number_is_refused_by_name(entry: str) -> None:
    with pytest.raises(ConfigErrors, match=r"reward\.functions.*expected a number"):
        load(None, [f"{FUNCTIONS}=[{entry}]"])
