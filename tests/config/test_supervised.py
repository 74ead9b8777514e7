"""The config of `gspo sft`: its defaults, the keys that it uses, and warnings about the others."""

from __future__ import annotations

import pytest

from gspo.config import ConfigErrors, load, load_supervised
from gspo.config.checks.supervised import drop_unused
from gspo.config.loading import tree
from gspo.config.loading.settings import Layer, Origin, Settings

A = "actor_rollout_ref.actor"
R = "actor_rollout_ref.rollout"


def test_the_defaults_are_those_of_its_recipe_for_every_model():
    for model in ("embedded", "org/model"):
        resolved = load_supervised(overrides=[f"actor_rollout_ref.model.path={model}"])
        c, optim = resolved.config, resolved.config.actor_rollout_ref.actor.optim
        assert (c.data.train_batch_size, c.data.max_length, c.trainer.total_training_steps) == (64, 2048, 1000)
        assert (optim.lr, optim.lr_scheduler_type, optim.lr_warmup_steps_ratio) == (1e-3, "cosine", 0.05)
        assert resolved.origin(f"{A}.optim.lr") == "recipe sft"
        assert c.actor_rollout_ref.model.dtype == "auto" and not resolved.warnings


def test_a_step_is_one_mini_batch():
    for size in (3, 64, 1000):
        config = load_supervised(overrides=[f"data.train_batch_size={size}"]).config
        assert config.actor_rollout_ref.actor.ppo_mini_batch_size == size


def test_keys_of_reinforcement_learning_keep_their_defaults_and_are_named():
    words = {
        f"{R}.temperature": 0.5,
        f"{A}.ppo_mini_batch_size": 8,
        f"{A}.ppo_epochs": 3,
        f"{A}.use_kl_loss": "true",
        f"{A}.entropy_coeff": 0.1,
        "algorithm.adv_estimator": "gae",
        "algorithm.filter_groups.enable": "true",
        f"{R}.mode": "async",
        "data.gen_batch_size": 7,
        "reward.timeout": 3,
    }
    resolved = load_supervised(overrides=[f"{key}={value}" for key, value in words.items()])
    assert {w.key for w in resolved.warnings} == set(words)
    assert all(w.level == "warning" and "has no effect: gspo sft" in w.message for w in resolved.warnings)
    for key in set(words) - {f"{A}.ppo_mini_batch_size"}:
        assert resolved.get(key) == tree.leaves()[key].default


def test_a_config_of_gspo_train_can_be_used(tmp_path):
    file = tmp_path / "train.yaml"
    words = [f"{R}.n=4", "data.train_batch_size=16", f"{A}.optim.lr=3e-6"]
    file.write_text(load(overrides=["actor_rollout_ref.model.path=org/model", *words]).to_yaml())
    config = load_supervised(file).config
    assert config.data.train_batch_size == config.actor_rollout_ref.actor.ppo_mini_batch_size == 16
    assert config.actor_rollout_ref.actor.optim.lr == 3e-6


def test_its_own_config_loads_again_without_a_warning(tmp_path):
    first = load_supervised(overrides=["trainer.total_epochs=2", "data.max_length=99", f"{A}.strategy=fsdp2"])
    file = tmp_path / "config.yaml"
    file.write_text(first.to_yaml())
    again = load_supervised(file)
    assert again.to_dict() == first.to_dict() and again.config.trainer.total_training_steps is None
    assert not again.warnings


def test_accuracy_makes_keys_of_generation_and_rewards_count():
    words = [f"{R}.max_num_seqs=7", "data.max_response_length=9", "reward.timeout=3"]
    assert len(load_supervised(overrides=words).warnings) == 3
    resolved = load_supervised(overrides=[*words, "trainer.val_accuracy=true"])
    assert not resolved.warnings and resolved.get(f"{R}.max_num_seqs") == 7


@pytest.mark.parametrize(
    ("word", "text"),
    [
        (f"{A}.use_dynamic_bsz=false", "micro-batch size"),
        (f"{A}.optim.betas=[1, 2, 3]", "two numbers"),
        ("data.train_files=nowhere.jsonl", "no such file"),
        ("trainer.save_freq=often", "number of steps"),
        ("data.max_length=0", "greater than 0"),
        ("nonsense=1", "unknown"),
    ],
)
def test_mistakes_are_refused(word, text):
    with pytest.raises(ConfigErrors, match=text):
        load_supervised(overrides=[word])


def test_a_budget_below_the_longest_example_is_said():
    (warning,) = load_supervised(overrides=[f"{A}.ppo_max_token_len_per_gpu=100"]).warnings
    assert "longest example, 2048 tokens" in warning.message


@pytest.mark.parametrize("word", ["data.max_length=9", "data.response_key=a", "trainer.val_accuracy=true"])
def test_gspo_train_names_the_keys_of_gspo_sft(word):
    (warning,) = [w for w in load(overrides=[word]).warnings if w.key == word.partition("=")[0]]
    assert warning.message == "has no effect: only gspo sft uses it"


@pytest.mark.parametrize(
    ("key", "plain", "with_accuracy"),
    [
        ("data.train_files", True, True),
        ("data.gen_batch_size", False, False),
        ("data.sft_files", False, False),
        ("data.sft_batch_size", False, False),
        ("data.max_prompt_length", False, True),
        ("data.val_batch_size", False, True),
        ("data.ground_truth_key", False, True),
        ("trainer.total_epochs", True, True),
        ("trainer.critic_warmup", False, False),
        ("trainer.save_groups", False, False),
        ("trainer.log_val_generations", False, True),
        (f"{A}.optim.lr", True, True),
        (f"{A}.grad_clip", True, True),
        (f"{A}.strategy", True, True),
        (f"{A}.ppo_max_token_len_per_gpu", True, True),
        (f"{A}.ulysses_sequence_parallel_size", True, True),
        (f"{A}.clip_ratio", False, False),
        (f"{A}.fsdp_config.fsdp_size", True, True),
        ("actor_rollout_ref.model.lora_rank", True, True),
        (f"{R}.val_kwargs.n", False, True),
        (f"{R}.max_num_seqs", False, True),
        (f"{R}.temperature", False, False),
        ("reward.timeout", False, True),
        ("reward_model.enable", False, True),
        ("custom_reward_function.path", False, True),
        ("algorithm.gamma", False, False),
        ("critic.optim.lr", False, False),
    ],
)
def test_which_keys_gspo_sft_uses(key, plain, with_accuracy):
    default = tree.leaves()[key].default
    for accuracy, used in ((False, plain), (True, with_accuracy)):
        settings = Settings()
        for name, leaf in tree.leaves().items():
            settings.put(name, leaf.default, Origin(Layer.DEFAULT, "default"))
        settings.put("trainer.val_accuracy", accuracy, Origin(Layer.FILE, "here"))
        settings.put(key, "other", Origin(Layer.FILE, "here"))
        said = [problem.key for problem in drop_unused(settings)]
        assert (said, settings[key].value) == (([], "other") if used else ([key], default)), accuracy


def test_a_step_is_one_mini_batch_whatever_was_set():
    settings = Settings()
    for name, leaf in tree.leaves().items():
        settings.put(name, leaf.default, Origin(Layer.RECIPE, "recipe"))
    settings.put("data.train_batch_size", 12, Origin(Layer.FILE, "here"))
    assert drop_unused(settings) == []
    assert settings[f"{A}.ppo_mini_batch_size"].value == 12
    assert settings[f"{A}.ppo_mini_batch_size"].origin == Origin(Layer.DERIVED, "a step is one mini-batch")
    settings.put(f"{A}.ppo_mini_batch_size", 12, Origin(Layer.FILE, "here"))
    assert drop_unused(settings) == []
    settings.put(f"{A}.ppo_mini_batch_size", 4, Origin(Layer.FILE, "here"))
    (problem,) = drop_unused(settings)
    assert problem.key == f"{A}.ppo_mini_batch_size" and problem.level == "warning"
    settings.put(f"{A}.clip_ratio", 0.5, Origin(Layer.RECIPE, "recipe"))
    assert drop_unused(settings) == [] and settings[f"{A}.clip_ratio"].value is None
