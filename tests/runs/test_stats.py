"""The interval of a difference against its published formula and against simulation."""

from __future__ import annotations

import random

import pytest

from gspo.runs.stats import (
    PairedDifference,
    correctness,
    paired_by_question,
    paired_difference,
    question_scores,
    share_right,
)


def test_paired_interval_is_the_published_formula() -> None:
    n11, n12, n21, n22 = 50, 3, 15, 32  # b right where a was wrong: 15; the reverse: 3
    a = [1.0] * n11 + [1.0] * n12 + [0.0] * n21 + [0.0] * n22
    b = [1.0] * n11 + [0.0] * n12 + [1.0] * n21 + [0.0] * n22
    n, z = len(a), 1.959963984540054
    p12, p21 = (n21 + 1) / (n + 2), (n12 + 1) / (n + 2)
    centre, half = p12 - p21, z * ((p12 + p21 - (p12 - p21) ** 2) / (n + 2)) ** 0.5
    result = paired_difference(a, b)
    assert result is not None
    assert (result.low, result.high) == pytest.approx((centre - half, centre + half), rel=1e-12)
    assert result.difference == pytest.approx(0.12)
    assert (result.num_better, result.num_worse, result.num_questions) == (15, 3, 100)
    assert result.clear


def test_paired_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    rng, covered, trials = random.Random(0), 0, 1500
    for _ in range(trials):
        a, b = [], []
        for _ in range(60):
            skill = rng.random()
            a.append(float(rng.random() < skill))
            b.append(float(rng.random() < min(1.0, skill + 0.1)))
        result = paired_difference(a, b)
        assert result is not None
        covered += result.low <= 0.095 <= result.high  # E[min(1, s + .1) - s] = .1 - .005
    assert 0.93 <= covered / trials <= 0.98


def test_agreement_on_every_question_is_not_certainty() -> None:
    result = paired_difference([1.0] * 20, [1.0] * 20)
    assert result is not None
    assert result.difference == 0
    assert result.low < 0 < result.high
    assert not result.clear


def test_only_the_same_questions_are_paired() -> None:
    def record(uid: str, question: str, acc: float | None, score: float | None = None) -> dict:
        responses = [{"acc": acc, "score": score}]
        return {"uid": uid, "messages": [{"content": question}], "ground_truth": "1", "responses": responses}

    a = question_scores([record("1", "x", 0.0), record("2", "y", 1.0), record("3", "z", 1.0), record("5", "v", None)])
    b = question_scores(
        [record("1", "x", 1.0), record("2", "other", 1.0), record("3", "z", 0.5), record("4", "w", 1.0)]
    )
    assert set(a) == {"1", "2", "3"}
    result, left_out = paired_by_question(a, b)
    assert result is not None
    assert (result.num_questions, result.mean_a, result.mean_b, left_out) == (2, 0.5, 0.75, 2)
    assert paired_by_question(a, {})[0] is None


def test_an_interval_that_touches_zero_is_not_clear() -> None:
    counts = {"num_questions": 1, "num_better": 1, "num_worse": 0, "mean_a": 0.0, "mean_b": 0.5}
    for low, high, clear in ((0.0, 0.5, False), (-0.5, 0.0, False), (0.01, 0.5, True), (-0.5, -0.01, True)):
        assert PairedDifference(difference=0.2, low=low, high=high, **counts).clear is clear


def test_a_response_counts_by_its_accuracy_and_else_by_a_score_of_0_or_1() -> None:
    assert correctness({"acc": 0.0, "score": 0.9}) == 0.0
    assert correctness({"acc": None, "score": 1}) == 1.0
    assert correctness({"acc": None, "score": 0.9}) is None
    assert correctness({"score": None}) is None


def test_a_share_is_right_only_where_every_reward_has_that_scale() -> None:
    right, wrong, half, missing = {"acc": 1.0}, {"score": 0}, {"score": 0.5}, {"score": None, "acc": None}
    assert share_right([right, wrong, missing]) == 0.5
    assert share_right([right, wrong, half]) is None
    assert share_right([missing]) is None


def test_unequal_lengths_are_an_error() -> None:
    with pytest.raises(ValueError, match="2 and 1"):
        paired_difference([1.0, 0.0], [1.0])
