"""Sentences of configs and plans that once confused newcomers, as they read now."""

from __future__ import annotations

import pytest

from gspo.config import ConfigErrors, load
from gspo.config.text.dry_run import dry_run_text


def problem(override: str) -> str:
    with pytest.raises(ConfigErrors) as caught:
        load(overrides=[override])
    (found,) = caught.value.problems
    return str(found)


def test_a_default_of_nothing_is_written_as_in_yaml() -> None:
    assert "remove it to use the default, null" in problem("trainer.num_threads=0")
    assert load(overrides=["trainer.num_threads=null"]).config.trainer.num_threads is None


def test_the_example_of_a_list_is_one_that_works() -> None:
    said = problem("reward.functions=3")
    example = said.partition("e.g. ")[2].strip().strip("'")
    assert example.startswith("reward.functions=[{name: ")
    assert load(overrides=[example]).config.reward.functions


def test_only_the_key_that_is_missing_is_named() -> None:
    assert "has no `name`" in problem("reward.functions=[{path: mine.py}]")


def test_a_plan_counts_in_plain_words() -> None:
    text = dry_run_text(load(overrides=["trainer.total_training_steps=1"]))
    (batches,) = [line for line in text.splitlines() if line.startswith("  generation batch")]
    assert batches.endswith("32 prompts, any number of batches per step")
    assert "generated tokens per step  no limit\n" in text
    assert "1 steps" not in text and "a step" not in text.replace("of a step", "")
    one = load(overrides=["algorithm.filter_groups.max_num_gen_batches=1"])
    assert "at most 1 batch per step" in dry_run_text(one)


def test_a_setting_without_effect_is_said_to_have_none() -> None:
    (warning,) = load(overrides=["algorithm.kl_ctrl.kl_coef=0.5"]).warnings
    assert "has no effect" in str(warning)
