"""Rules between keys at their limits: the last value that is accepted and the first that is refused."""

from __future__ import annotations

import pytest

from gspo.config import ConfigErrors, load

ACTOR, ROLLOUT, FILTER = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm.filter_groups"
BUFFER = "reward_model.reward_kwargs.overlong_buffer_cfg"
LENGTHS = ("data.max_prompt_length=100", "data.max_response_length=50")
SIZES = ("data.train_batch_size=8", f"{ACTOR}.ppo_mini_batch_size=4", f"{ROLLOUT}.n=3")
AHEAD = (f"{ROLLOUT}.mode=async", f"{ROLLOUT}.max_head_offpolicyness=1", f"{ACTOR}.use_decoupled_loss=true")
CASES = [
    ((*AHEAD, f"{FILTER}.enable=true"), f"{FILTER}.strategy", "stream", "rounds"),
    (AHEAD, "algorithm.use_kl_in_reward", "false", "true"),
    (LENGTHS, f"{ROLLOUT}.max_model_len", 150, 149),
    (SIZES, f"{ACTOR}.ppo_micro_batch_size_per_gpu", 12, 13),
    (SIZES, "data.num_train_samples", 8, 7),
    (SIZES, "critic.ppo_mini_batch_size", 2, 3),
    ((f"{FILTER}.enable=true",), f"{ROLLOUT}.n", 2, 1),
    ((*LENGTHS, f"{BUFFER}.enable=true", "reward_model.reward_manager=dapo"), f"{BUFFER}.len", 49, 50),
    (("algorithm.adv_estimator=gae", "trainer.total_training_steps=5"), "trainer.critic_warmup", 4, 5),
    ((*SIZES, f"{FILTER}.enable=true", f"{FILTER}.strategy=rounds", "data.gen_batch_size=4"), f"{FILTER}.max_num_gen_batches", 2, 1),
    ((), f"{ACTOR}.clip_target_bounds", "[1,1]", "[1.1,2]"),
    ((), f"{ACTOR}.clip_target_bounds", "[0.5,1]", "[0.5,0.9]"),
    ((), f"{ACTOR}.optim.betas", "[0,0.999]", "[0.9,1]"),
    (("algorithm.adv_estimator=gae",), "critic.optim.betas", "[0.9,0.95]", "[0.9]"),
]  # fmt: skip


def errors_of(*words: str) -> set[str]:
    try:
        load(None, ["actor_rollout_ref.model.path=some/model", "data.train_files=arithmetic", *words])
    except ConfigErrors as errors:
        return {p.key for p in errors.problems if p.level == "error"}
    return set()


@pytest.mark.parametrize(("words", "key", "accepted", "refused"), CASES)
def test_a_rule_begins_at_its_limit(words, key, accepted, refused):
    assert errors_of(*words, f"{key}={accepted}") == set()
    assert key in errors_of(*words, f"{key}={refused}")
