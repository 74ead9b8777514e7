"""Values that follow from others, and give way to what somebody set."""

from __future__ import annotations

import pytest

from gspo.config import ConfigErrors, load

ACTOR = "actor_rollout_ref.actor"
STEPS, EPOCHS, DYNAMIC = "trainer.total_training_steps", "trainer.total_epochs", f"{ACTOR}.use_dynamic_bsz"
TRAIN, MINI, SAMPLES = "data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size", "data.num_train_samples"


def test_epochs_that_were_set_replace_the_recipes_steps():
    assert load().get(STEPS) is not None
    assert load(overrides=[f"{EPOCHS}=2"]).get(STEPS) is None
    assert load(overrides=[f"{EPOCHS}=2", f"{STEPS}=7"]).get(STEPS) == 7


def test_a_micro_batch_size_switches_the_token_budget_off_unless_that_was_set():
    micro = f"{ACTOR}.ppo_micro_batch_size_per_gpu=2"
    assert load().get(DYNAMIC) is True
    assert load(overrides=[micro]).get(DYNAMIC) is False
    assert load(overrides=[micro, f"{DYNAMIC}=true"]).get(DYNAMIC) is True


@pytest.mark.parametrize(
    ("words", "train"),
    [
        ((f"{SAMPLES}=10",), 8),  # a multiple of the usual four mini-batches
        ((f"{SAMPLES}=3",), 3),
        ((f"{SAMPLES}=10", f"{MINI}=3"), 9),
        ((f"{SAMPLES}=1000",), 32),
    ],
)
def test_a_batch_that_nobody_set_is_not_larger_than_the_samples(words, train):
    assert load(overrides=list(words)).get(TRAIN) == train


def test_a_ratio_level_that_contradicts_its_loss_is_an_error_and_alone_selects_one():
    level, loss = f"{ACTOR}.importance_sampling_level", f"{ACTOR}.policy_loss.loss_mode"
    assert load(overrides=[f"{level}=token"]).get(loss) == "vanilla"
    with pytest.raises(ConfigErrors, match=rf"contradicts {loss} = gspo"):
        load(overrides=[f"{level}=token", f"{loss}=gspo"])
