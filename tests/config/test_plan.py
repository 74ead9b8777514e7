"""The batch plan counts what a step does."""

from __future__ import annotations

from gspo.config import BatchPlan, load
from gspo.config.batch_plan import roles, without_effect

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
