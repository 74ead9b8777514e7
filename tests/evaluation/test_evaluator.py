"""Estimates over several answers, and intervals."""

from __future__ import annotations

import itertools

import pytest

from gspo.evaluation.evaluator import best_of, summarise, wilson
from gspo.types import Group, Prompt, Reward, Rollout


def test_best_of_is_the_mean_over_all_subsets():
    values = [0.1, 0.9, 0.4, 0.4, 0.0]
    for k in range(1, 6):
        subsets = list(itertools.combinations(values, k))
        assert best_of(values, k) == pytest.approx(sum(map(max, subsets)) / len(subsets))


def test_wilson_interval():
    assert wilson(0.9, 10) == pytest.approx((0.5958, 0.9821), abs=1e-4)  # 9 of 10: the textbook example
    assert wilson(0.5, 100) == pytest.approx((0.40383, 0.59617), abs=1e-4)
    low, high = wilson(0.0, 10)
    assert low == 0.0 and high == pytest.approx(0.27753, abs=1e-4)
    assert wilson(0.3, 0) == (0.0, 1.0)


def group(source: str, answers: list[tuple[str, float | None]]) -> Group:
    rollouts = tuple(
        Rollout((1,), (0.0,), (1,), (0,), "stop", text, None if right is None else Reward(right, right))
        for text, right in answers
    )
    return Group(Prompt(f"{source}/{len(answers)}", (), (1,), source), rollouts, 0, 0)


def test_sources_are_apart_missing_rewards_are_left_out_and_the_majority_votes():
    groups = [
        group("a", [("4", 1.0), ("5", 0.0), ("4", 1.0)]),
        group("a", [("1", 0.0), ("1", 0.0), ("2", 1.0)]),
        group("b", [("x", None), ("y", 1.0), ("y", 1.0)]),
    ]
    found = summarise(groups)
    values = {k: m.result() for k, m in found.metrics.items()}
    assert values["val-core/a/acc/mean@3"] == pytest.approx(0.5)
    assert values["val-core/a/acc/best@3"] == 1.0
    assert values["val-core/a/acc/maj@3"] == 0.5
    assert values["val-core/b/acc/mean@2"] == 1.0
    assert values["val-aux/b/reward_failures"] == 1
    assert found.accuracy == pytest.approx((2 / 3 + 1 / 3 + 1.0) / 3)


def test_a_mean_that_is_no_share_has_no_interval():
    """verl's dapo reward manager takes a missing accuracy from the score, which may be -1."""
    assert wilson(-0.5, 10) is None and wilson(1.5, 10) is None
    rewards = [Reward(-1.0, acc=-1.0), Reward(1.0, acc=1.0), Reward(-1.0, acc=-1.0)]
    groups = [
        Group(Prompt(str(i), (), (1,), "task"), (Rollout((1,), (0.0,), (1,), (0,), "stop", reward=reward),), i, 0)
        for i, reward in enumerate(rewards)
    ]
    evaluation = summarise(groups)
    assert evaluation.accuracy == pytest.approx(-1 / 3) and evaluation.interval is None
    assert evaluation.metrics["val-core/task/acc/mean@1"].result() == pytest.approx(-1 / 3)
    assert not any("ci_" in name for name in evaluation.metrics)
