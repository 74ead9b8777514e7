"""Built-in rewards: which one grades a data source, and what right and wrong answers earn."""

from __future__ import annotations

import pytest

from gspo.rewards.builtin import by_name, by_source
from gspo.rewards.protocol import RewardError
from gspo.rewards.signatures import Response
from gspo.types import Prompt, Reward


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("arithmetic", "arithmetic"),
        ("openai/gsm8k", "gsm8k"),
        ("reasoning", "gsm8k"),
        ("reasoning_gym", "reasoning_gym"),
        ("math500", "math"),
        ("math_dapo", "math"),
        ("aime2024", "math"),
        ("aime", "math"),
        ("codecontests", "code"),
    ],
)
def test_a_data_source_has_its_reward(source, name):
    assert by_source(source).name == name


def test_unknown_names_and_sources_are_refused_with_the_nearest():
    with pytest.raises(RewardError, match="did you mean 'gsm8k'"):
        by_name("gsm8")
    with pytest.raises(RewardError, match="no built-in reward grades data_source 'xaime'"):
        by_source("xaime")


def graded(name: str, text: str, truth: object = None, tokens: int = 0, **options) -> Reward:
    result = by_name(name).fn(Prompt("p", (), (), name, truth), Response(text, (0,) * tokens), **options)
    return result if isinstance(result, Reward) else Reward(result)


@pytest.mark.parametrize(
    ("name", "truth", "right", "wrong"),
    [
        ("arithmetic", "12", "5+7;12", "5+7;13"),
        ("exact", "abc", " abc\n", "abcd"),
        ("gsm8k", "7", "so\n#### 7.0", "so\n#### 8"),
        ("math", "1/2", "\\boxed{\\frac{1}{2}}", "\\boxed{\\frac{1}{3}}"),
    ],
)
def test_score_and_accuracy_are_1_for_a_right_answer_and_0_for_a_wrong_one(name, truth, right, wrong):
    for text, value in ((right, 1.0), (wrong, 0.0), ("", 0.0)):
        got = graded(name, text, truth)
        assert (got.score, got.acc) == (value, value), text


def test_rewards_of_form_have_no_accuracy():
    assert graded("format", "<think>a</think><answer>b</answer>") == Reward(1.0)
    assert graded("format", "<a>x</a>", tags=("a",)) == Reward(1.0)
    assert graded("repetition", "a b a b a b", ngram=2).score == pytest.approx(2 / 5 - 1)
    assert graded("length", "", tokens=75, max_length=100, free=50).score == -0.5
