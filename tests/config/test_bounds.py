"""Numbers outside their bounds, and numbers that are none, are refused with what was expected."""

from __future__ import annotations

import pytest

from gspo.config import ConfigErrors, load

LR = "actor_rollout_ref.actor.optim.lr"


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        (f"{LR}=.inf", "a finite number"),
        (f"{LR}=.nan", "a finite number"),
        (f"{LR}=-1e-9", "of at least 0"),
        ("actor_rollout_ref.rollout.temperature=0", "greater than 0"),
        ("actor_rollout_ref.rollout.top_p=1.01", "of at most 1"),
        ("actor_rollout_ref.actor.ppo_epochs=0", "greater than 0"),
        ("algorithm.gamma=1.5", "of at most 1"),
        ("reward.max_failure_rate=-0.1", "of at least 0"),
        ("algorithm.filter_groups.predict_min_prob=0", "greater than 0"),
    ],
)
def test_a_number_outside_its_bounds_is_refused(word, expected):
    with pytest.raises(ConfigErrors) as caught:
        load(None, [word])
    problems = [p for p in caught.value.problems if p.key == word.partition("=")[0]]
    assert problems and expected in problems[0].message


@pytest.mark.parametrize(
    "word", [f"{LR}=0", "actor_rollout_ref.rollout.top_p=1", "algorithm.gamma=0", "algorithm.lam=1"]
)
def test_a_bound_that_is_included_is_accepted(word):
    load(None, [word])
