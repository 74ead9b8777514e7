"""Weighted composition, managers, shaping: values worked out by hand."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gspo.rewards.compose import Finishing, Grader, Overlong, RewardScale, as_specs, build_grading, manage
from gspo.rewards.functions import Response, RewardSpec, wrap_function
from gspo.rewards.protocol import RewardError
from gspo.rewards.shaping import format_reward, length_penalty, overlong_penalty, repetition_penalty
from gspo.types import Prompt, Reward, Rollout

PROMPT = Prompt("row-1", (), (), "exact", "abc")


def constant(score: float, **kwargs: Any) -> Any:
    def fn(prompt: Prompt, response: str) -> Reward:
        return Reward(score, **kwargs)

    return fn


def grade(rewards: Any, text: str = "abc") -> Any:
    return Grader(as_specs(rewards)).grade(PROMPT, [Response(text)])[0]


def test_weighted_sum_keeps_the_first_acc_and_each_part() -> None:
    parts = [
        wrap_function(constant(2.0, extra={"a": 1.0}), name="one", weight=0.5),
        wrap_function(constant(-1.0, acc=1.0), name="two", weight=3.0),
        wrap_function(constant(4.0, acc=0.0), name="three"),
    ]
    reward = grade(parts)
    assert reward.score == 0.5 * 2 - 3 + 4
    assert reward.acc == 1.0
    assert reward.extra == {"a": 1.0, "reward/one": 2.0, "reward/two": -1.0, "reward/three": 4.0}


def test_a_failed_part_makes_the_whole_missing() -> None:
    def failing(prompt: Prompt, response: str) -> float:
        raise KeyError("lost")

    assert "KeyError" in grade([constant(1.0), failing, constant(2.0)])


def test_a_sum_that_is_not_finite_makes_the_whole_missing() -> None:
    parts = [wrap_function(constant(1e308), name="huge", weight=10.0), wrap_function(constant(1.0), name="one")]
    assert grade(parts) == "the weighted sum of huge, one is inf, expected a finite number"


def test_a_single_reward_is_passed_on_untouched() -> None:
    assert grade(constant(0.25, acc=1.0, extra={"x": 2.0})) == Reward(0.25, 1.0, {"x": 2.0})


def test_the_weight_of_a_single_reward_counts_and_a_missing_acc_stays_missing() -> None:
    half = grade(wrap_function(constant(3.0, extra={"x": 2.0}), name="one", weight=0.5))
    assert half == Reward(1.5, None, {"x": 2.0, "reward/one": 3.0})
    assert grade([constant(1.0), constant(2.0)]).acc is None


def test_random_rewards_depend_on_the_row_and_the_responses_alone() -> None:
    """Whichever worker grades a response, and in which order, a reward that draws random numbers is the same."""

    def drawing(prompt: Prompt, response: str) -> float:
        return random.random() + float(np.random.rand())

    def scores(*texts: str) -> list[float]:
        handle, _ = build_grading([wrap_function(drawing)])
        return [handle((PROMPT, [Response(text)]))[0]["score"] for text in texts]

    state = random.getstate(), np.random.get_state()
    try:
        first, second = scores("a", "b"), scores("b", "a")
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
    assert first == second[::-1] and first[0] != first[1]


def test_default_is_chosen_by_data_source() -> None:
    assert grade(None).score == 1.0
    unknown = Prompt("row-9", (), (), "poetry", "abc")
    failure = Grader(as_specs(None)).grade(unknown, [Response("abc")])[0]
    assert isinstance(failure, str) and "'poetry'" in failure and "custom_reward_function.path" in failure


def test_specs_come_as_names_files_dicts_and_functions() -> None:
    assert as_specs("math") == [RewardSpec("math")]
    assert as_specs("dir/f.py:score") == [RewardSpec("score", "dir/f.py")]
    assert as_specs([{"name": "format", "weight": 0.1}]) == [RewardSpec("format", weight=0.1)]
    for bad in ([], {"nam": "x"}, 3):
        with pytest.raises(RewardError):
            as_specs(bad)  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="no built-in reward 'mth'"):
        Grader(as_specs("mth"))


def test_naive_changes_nothing_and_dapo_fills_acc() -> None:
    reward = Reward(0.5)
    assert manage(reward, 10, "naive", None) is reward
    assert manage(reward, 10, "dapo", None).acc == 0.5
    assert manage(Reward(0.5, acc=0.0), 10, "dapo", None).acc == 0.0


@pytest.mark.parametrize(("length", "penalty"), [(0, 0.0), (12, 0.0), (14, -0.5), (15, -0.75), (16, -1.0), (40, -1.0)])
def test_overlong_penalty_of_dapo(length: int, penalty: float) -> None:
    assert overlong_penalty(length, max_length=16, buffer=4) == penalty
    managed = manage(Reward(1.0), length, "dapo", Overlong(16, 4, factor=2.0, log=True))
    assert managed.score == 1.0 + 2 * penalty and managed.acc == 1.0
    assert managed.extra == {"overlong_reward": 2 * penalty, "overlong": float(penalty < 0)}
    quiet = manage(Reward(1.0, acc=0.0), length, "dapo", Overlong(16, 4, factor=2.0))
    assert quiet == Reward(1.0 + 2 * penalty, 0.0)


@pytest.mark.parametrize(
    ("scale", "scores"),
    [
        (RewardScale(), (-3.0, 0.5, 3.0)),
        (RewardScale(scale=2.0, bias=0.5), (-5.0, 2.0, 7.0)),
        (RewardScale(scale=2.0, bias=0.5, clip=4.0), (-4.0, 2.0, 4.0)),
        (RewardScale(scale=-1.0, clip=1.0), (1.0, -0.5, -1.0)),
    ],
)
def test_a_score_is_shifted_then_scaled_then_clipped_and_the_rest_of_the_reward_stays(scale, scores) -> None:
    for before, after in zip((-3.0, 0.5, 3.0), scores, strict=True):
        assert scale.apply(Reward(before, 1.0, {"x": 3.0}, noise=0.25)) == Reward(after, 1.0, {"x": 3.0}, noise=0.25)


def test_settings_of_the_default_reward_go_to_the_built_in_that_they_name() -> None:
    spec = RewardSpec("default", weight=0.5, kwargs={"format": {"tags": ("a",)}, "exact": {}})
    form = Prompt("row", (), (), "format", None)
    assert Grader([spec]).grade(form, [Response("<a>x</a>")]) == [Reward(0.5, None, {"reward/format": 1.0})]


def test_the_overlong_penalty_counts_what_the_model_wrote_and_comes_before_the_scale() -> None:
    rollout = Rollout((5,) * 20, (0.0,) * 20, (1,) * 14 + (0,) * 6, (0,) * 20, "stop", text="x" * 99)
    finishing = Finishing("dapo", Overlong(16, 4), RewardScale(scale=2.0))
    assert finishing.apply(rollout, Reward(1.0)).reward == Reward(2 * (1.0 - 0.5), 1.0)
    failed = finishing.apply(rollout, "it broke")
    assert failed.reward is None and failed.failure == "it broke"


def test_overlong_buffer_must_fit() -> None:
    for buffer in (0, 17):
        with pytest.raises(ValueError, match="max_length=16"):
            overlong_penalty(1, 16, buffer)


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        (" <think>a\n</think>\n\n<answer>b</answer>\n", 1.0),
        ("<think>a</think><answer>b</answer> more", 0.0),
        ("before <think>a</think><answer>b</answer>", 0.0),
        ("<think></think><answer>b</answer>", 0.0),
        ("<answer>b</answer><think>a</think>", 0.0),
        ("<think>a<think></think><answer>b</answer>", 0.0),
        ("<think>a</think><answer>b", 0.0),
        ("<think>a</think> and <answer>b</answer>", 0.0),
        ("", 0.0),
    ],
)
def test_format_reward(text: str, score: float) -> None:
    assert format_reward(text) == score


def test_repetition_penalty_counts_repeated_ngrams() -> None:
    assert repetition_penalty("a b c d e f", ngram=2) == 0.0
    assert repetition_penalty("a b a b a b", ngram=2) == pytest.approx(2 / 5 - 1)
    assert repetition_penalty("one two", ngram=4) == 0.0


@given(st.text(), st.integers(1, 5))
def test_repetition_penalty_is_between_minus_one_and_zero(text: str, ngram: int) -> None:
    assert -1.0 < repetition_penalty(text, ngram) <= 0.0


def test_length_shaping() -> None:
    assert [length_penalty(n, 100, free=50) for n in (0, 50, 75, 100, 300)] == [0.0, 0.0, -0.5, -1.0, -1.0]
