"""Defaults of a recipe that the user's own choices make impossible give way, and say so."""

from __future__ import annotations

import json

import pytest

from gspo.config import load
from gspo.loop.trainer import Trainer
from gspo.rewards import RewardError
from gspo.runs.console import Console

SMALL = ["data.train_batch_size=4", "rollout.n=4", "data.num_val_samples=8", "trainer.total_training_steps=1"]


def digits(prompt, response):
    return len(response) / 10


def train(folder, *overrides, reward=digits):
    names = [f"trainer.default_local_dir={folder}", "trainer.experiment_name=run", "trainer.num_threads=1"]
    trainer = Trainer(load(None, [*SMALL, *names, *overrides]), reward, console=Console(enabled=False))
    return trainer, trainer.fit()


def settings(folder) -> dict:
    return {s["key"]: s for s in json.loads((folder / "run" / "config.json").read_text())}


def test_a_plain_number_is_a_reward_with_the_embedded_recipe_too(tmp_path):
    trainer, result = train(tmp_path)
    assert result["steps"] == 1
    metric = settings(tmp_path)["algorithm.filter_groups.metric"]
    assert metric["value"] == "seq_reward" and "returns no acc" in metric["origin"]
    # The run goes on with the same metric.
    trainer, result = train(tmp_path, "trainer.total_training_steps=1", "trainer.test_freq=1")
    assert trainer.config.algorithm.filter_groups.metric == "seq_reward"


def test_a_metric_that_the_user_set_does_not_give_way(tmp_path):
    with pytest.raises(RewardError, match=r"filter_groups\.metric='acc' is not returned"):
        train(tmp_path, "algorithm.filter_groups.metric=acc")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("choice", "key", "reason"),
    [
        ("rollout.n=1", "algorithm.filter_groups.enable", "rollout.n = 1"),
        ("algorithm.use_kl_in_reward=true", "actor_rollout_ref.actor.use_kl_loss", "use_kl_in_reward is set"),
    ],
)
def test_a_recipes_setting_that_a_choice_excludes_is_off_and_said(choice, key, reason):
    resolved = load(None, [choice])
    assert resolved.get(key) is False
    assert any(w.key == key and reason in w.message for w in resolved.warnings)
