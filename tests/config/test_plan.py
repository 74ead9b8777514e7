"""The batch plan counts what a step does."""

from __future__ import annotations

import copy
import functools

import pytest

from gspo.config import BatchPlan, TrainerConfig, load
from gspo.config.batch_plan import roles, trains_on_ranks, without_effect
from gspo.config.loading import tree
from gspo.config.resolved_loss import ResolvedLoss, resolved_loss
from gspo.config.reward_parts import JudgePart, RewardParts, entry_problem, judge_values, split_rewards

PLAIN = "actor_rollout_ref.model.path=org/model"


def plan(*overrides: str) -> BatchPlan:
    return BatchPlan.of(load(overrides=[PLAIN, *overrides]).config)


def test_sizes_of_a_step():
    p = plan(
        "data.train_batch_size=512",
        "data.gen_batch_size=1536",
        "algorithm.filter_groups.enable=true",
        "algorithm.filter_groups.max_num_gen_batches=10",
        "actor_rollout_ref.rollout.n=5",
        "actor_rollout_ref.actor.ppo_mini_batch_size=128",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "data.max_prompt_length=100",
        "data.max_response_length=200",
    )
    assert (p.prompts, p.rollouts, p.generation_batch) == (512, 2560, 1536)
    assert (p.num_mini_batches, p.optimiser_steps, p.mini_batch_rollouts) == (4, 8, 640)
    assert (p.max_tokens, p.max_trained_tokens) == (2560 * 300, 2560 * 200)
    assert p.max_generated_tokens == 10 * 1536 * 5 * 200
    assert p.total_steps is None


def test_without_filtering_one_generation_batch_of_the_training_size():
    p = plan("data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    assert p.generation_batch == 64
    assert p.max_generated_tokens == p.max_trained_tokens


def test_unlimited_generation_has_no_bound():
    assert plan("algorithm.filter_groups.enable=true").max_generated_tokens is None


def test_total_steps_by_steps_or_by_samples():
    assert plan("trainer.total_training_steps=7").total_steps == 7
    assert plan("data.num_train_samples=100", "data.train_batch_size=32", "trainer.total_epochs=3").total_steps == 9


def test_what_has_no_effect():
    one = load(overrides=[PLAIN, "actor_rollout_ref.actor.ppo_mini_batch_size=1024"]).config
    assert any("always 1" in line for line in without_effect(one))
    four = load(overrides=[PLAIN]).config
    assert any("first mini-batch" in line for line in without_effect(four))
    assert not any("always 1" in line for line in without_effect(four))
    assert any("equal rewards" in line for line in without_effect(four))


def test_roles_follow_the_config():
    assert roles(load(overrides=[PLAIN]).config) == {"reference": False, "critic": False, "reward model": False}
    config = load(overrides=["algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"]).config
    assert roles(config) == {"reference": True, "critic": True, "reward model": False}


@functools.cache
def _plain() -> TrainerConfig:
    return load(overrides=[PLAIN]).config


def plain() -> TrainerConfig:
    """A config of its own for each caller."""
    return copy.deepcopy(_plain())


def changed(config: TrainerConfig, **values: object) -> TrainerConfig:
    for key, value in values.items():
        tree.put(config, key.replace("__", "."), value)
    return config


def test_lengths_of_the_engine_come_before_those_of_the_data_and_limits_follow_the_filter():
    p = plan("data.max_prompt_length=100", "data.max_response_length=200")
    assert (p.max_prompt_tokens, p.max_response_tokens, p.max_generation_batches) == (100, 200, 1)
    config = plain()
    config.actor_rollout_ref.rollout.prompt_length, config.actor_rollout_ref.rollout.response_length = 30, 40
    config.data.gen_batch_size, config.data.train_batch_size = 7, 6
    config.actor_rollout_ref.actor.ppo_mini_batch_size = 12
    p = BatchPlan.of(config)
    assert (p.max_prompt_tokens, p.max_response_tokens) == (30, 40)
    assert (p.generation_batch, p.num_mini_batches) == (6, 1)  # without a filter the step is one generation batch
    config.algorithm.filter_groups.enable = True
    assert BatchPlan.of(config).generation_batch == 7
    config.algorithm.filter_groups.max_num_gen_batches = 3
    assert BatchPlan.of(config).max_generation_batches == 3


def test_the_lines_of_a_plan():
    p = BatchPlan(1, 8, 1, 1, 1, 2, 1000, 2000, 1, None)
    assert p.lines() == [
        ("training steps", "depends on the data"),
        ("prompts per step", "1"),
        ("rollouts per step", "8 (1 group of 8)"),
        ("generation batch", "1 prompt, at most 1 batch per step"),
        ("mini-batch", "1 prompt, 8 rollouts"),
        ("optimiser steps per step", "2 (1 mini-batch x 2 epochs)"),
        ("tokens per rollout", "up to 1,000 (prompt) + 2,000 (response)"),
        ("trained tokens per step", "up to 16,000"),
        ("generated tokens per step", "up to 16,000"),
    ]
    lines = dict(BatchPlan(1024, 8, 2048, 256, 4, 1, 10, 20, None, 1500).lines())
    assert lines["training steps"] == "1,500" and lines["generated tokens per step"] == "no limit"
    assert lines["generation batch"] == "2,048 prompts, any number of batches per step"
    assert lines["optimiser steps per step"] == "4 (4 mini-batches x 1 epoch)"


def test_steps_of_samples_count_whole_batches_of_every_epoch():
    words = ("data.train_batch_size=8", "trainer.total_epochs=3")
    assert plan(*words, "data.num_train_samples=15").total_steps == 3
    assert plan(*words, "data.num_train_samples=16").total_steps == 6
    assert plan(*words, "data.num_train_samples=16", "trainer.total_training_steps=4").total_steps == 4


def test_a_role_is_needed_for_each_of_its_reasons():
    def needed(**values: object) -> set[str]:
        return {role for role, on in roles(changed(plain(), **values)).items() if on}

    assert needed(actor_rollout_ref__actor__use_kl_loss=True) == {"reference"}
    assert needed(algorithm__use_kl_in_reward=True) == {"reference"}
    assert needed(algorithm__distill_weight=0.1) == {"reference"}
    assert needed(algorithm__adv_estimator="opd") == {"reference"}
    assert needed(algorithm__adv_estimator="gae") == {"critic"}
    assert needed(algorithm__adv_estimator="gae", critic__enable=False) == set()
    assert needed(critic__enable=True) == {"critic"}
    assert needed(reward_model__enable=True) == {"reward model"}
    assert needed(reward__functions=[{"model": "m"}]) == {"reward model"}


def test_ranks_train_with_fsdp_or_on_ray():
    config = plain()
    assert not trains_on_ranks(config)
    assert trains_on_ranks(changed(copy.deepcopy(config), actor_rollout_ref__actor__strategy="fsdp2"))
    assert trains_on_ranks(changed(copy.deepcopy(config), trainer__backend="ray"))


def test_sentences_about_what_has_no_effect():
    def said(**values: object) -> list[str]:
        return [line.partition(":")[0] for line in without_effect(changed(plain(), **values))]

    unused = ["keys of the reference", "keys of the critic", "keys of the reward model"]
    first, groups = "clipping in the first mini-batch of a step", "groups with equal rewards"
    assert said() == [first, groups, *unused]
    assert said(actor_rollout_ref__actor__ppo_mini_batch_size=1024) == ["clipping", groups, *unused]
    assert said(actor_rollout_ref__actor__old_log_prob_source="rollout") == [groups, *unused]
    assert said(actor_rollout_ref__actor__policy_loss__loss_mode="sapo") == [groups, *unused]
    assert said(actor_rollout_ref__rollout__n=1) == [first, *unused]
    assert said(algorithm__filter_groups__enable=True) == [first, *unused]
    assert said(algorithm__adv_estimator="gae") == [first, groups, unused[0], unused[2]]
    config = plain()
    assert without_effect(config, ["mine"])[0] == "mine"


def test_the_loss_of_an_actor_with_its_defaults_filled_in():
    def loss(**values: object) -> ResolvedLoss:
        actor = plain().actor_rollout_ref.actor
        for name, value in values.items():
            setattr(actor, name, value)
        return resolved_loss(actor)

    assert str(loss()) == "gspo: sequence ratio, clipped to [1 - 0.0003, 1 + 0.0004]"
    assert loss(clip_ratio=0.1).clip == (0.1, 0.1) and loss(clip_ratio_low=0.1).clip == (0.1, 0.0004)
    assert loss(clip_ratio=0.3, clip_ratio_high=0.2).clip == (0.3, 0.2)
    assert loss(clip_ratio=0.3, clip_ratio_low=0.2).clip == (0.2, 0.3)
    assert loss(loss_agg_mode="token-mean").aggregation == "token-mean"
    assert loss(importance_sampling_level="turn").is_sequence_level
    assert not loss(importance_sampling_level="token").is_sequence_level
    actor = plain().actor_rollout_ref.actor
    actor.policy_loss.loss_mode, actor.importance_sampling_level = "sapo", None
    assert str(resolved_loss(actor)) == "sapo: token ratio, no clip"
    actor.policy_loss.loss_mode = "mine"
    assert str(resolved_loss(actor)) == "mine" and resolved_loss(actor).clip == (0.2, 0.2)


def test_rewards_are_sorted_by_kind():
    entries = [{"name": "a", "weight": 0}, {"judge": {"model": "x"}, "name": "j", "weight": 2}, {"judge": True}]
    parts = split_rewards(entries, 0.5, None, "p")
    assert parts == RewardParts(
        [entries[0]], [JudgePart("j", 2.0, {"model": "x"}), JudgePart("judge", 1.0, {})], None, "p"
    )
    assert not parts.only_functions
    assert split_rewards([], 0.5, 0.25, "p") == RewardParts([], [JudgePart("judge", 0.5, {})], 0.25, "p")
    assert split_rewards([{"model": "m", "weight": 3}], None, 0.25, "p") == RewardParts([], [], 3.0, "m")
    assert split_rewards([{"model": {}}], None, None, "p") == RewardParts([], [], 1.0, "p")
    assert split_rewards([{"name": "a"}], None, None, None).only_functions
    assert not split_rewards([], None, 0.0, None).only_functions


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"name": "a", "path": "b", "weight": -1, "kwargs": {}}, None),
        ({"judge": {"model": "x"}, "name": "j", "weight": 1.5}, None),
        ({"judge": None}, None),
        ({"judge": True}, None),
        ({"model": "m", "weight": 0}, None),
        ({"model": None}, None),
        ({"weight": 1}, "has no `name`, `judge` or `model`"),
        ({"name": "a", "b": 1, "a": 2}, "has a, b; expected only name, path, weight, kwargs"),
        ({"judge": {}, "path": "x"}, "has path; expected only judge, name, weight"),
        ({"model": "m", "name": "x"}, "has name; expected only model, weight"),
        ({"name": "a", "weight": True}, "has weight=True; expected a number"),
        ({"name": "a", "weight": "1"}, "has weight='1'; expected a number"),
        ({"name": "a", "weight": float("nan")}, "has weight=nan; expected a number"),
        ({"judge": {}, "weight": float("inf")}, "has weight=inf; expected a number"),
        ({"model": 3}, "has model=3; expected a folder"),
        ({"judge": "x"}, "has judge='x'; expected {} or keys"),
        ({"judge": {"model": 1, "z": 2, "y": 3}}, "has y, z in judge; its keys are model"),
        ({"judge": False}, "has judge=False; expected true, or no such entry"),
        ({"model": False}, "has model=False; expected true, or no such entry"),
    ],
)
def test_an_entry_of_the_rewards(entry: dict[str, object], problem: str | None):
    found = entry_problem(entry, ("model",))
    assert found is None if problem is None else found is not None and problem in found


@pytest.mark.parametrize(
    ("given", "values", "problem"),
    [
        ({"kind": "rank", "timeout": "5", "samples": 2.0}, {"kind": "rank", "timeout": 5.0, "samples": 2}, None),
        ({"rubric": None}, {"rubric": None}, None),
        ({"kind": "best"}, {"kind": "best"}, "kind='best' in judge; expected one of reference, rubric, score, rank"),
        ({"timeout": "long", "model": "m"}, {"model": "m"}, "timeout='long' in judge; expected float"),
        ({"samples": 2.5}, {}, "samples=2.5 in judge; expected int"),
        ({"retries": -1}, {"retries": -1}, "retries=-1 in judge; expected a number of at least 0"),
        (
            {"max_concurrent": 0, "retries": 1},
            {"max_concurrent": 0, "retries": 1},
            "max_concurrent=0 in judge; expected",
        ),
    ],
)
def test_the_keys_of_a_judge_in_an_entry_are_checked_as_those_of_the_judge(
    given: dict[str, object], values: dict[str, object], problem: str | None
):
    assert judge_values(given)[0] == values
    found = entry_problem({"judge": given}, tuple(given))
    assert found is None if problem is None else found is not None and problem in found
    assert [part.replaced for part in split_rewards([{"judge": given}], None, None, None).judges] == [values]
