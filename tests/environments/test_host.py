"""The episodes of one worker: played on, played again where the worker is behind, drawn from the seed, and closed."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest

from gspo.environments.host import EpisodeHost, Job
from gspo.environments.protocol import Action, Step
from gspo.rewards.protocol import RewardError
from gspo.types import Prompt

PROMPT = Prompt("p", (), ())
ACTIONS = tuple(Action("go", (), (), turn) for turn in range(3))


class Dice:
    """Answers with a random number; fails at the action `fail`."""

    tools = ()
    num_open = 0

    def reset(self, prompt: Prompt, seed: int) -> Any:
        Dice.num_open += 1
        return ({"role": "user", "content": str(random.random())},)

    def step(self, action: Action) -> Step:
        if action == "fail":
            raise RuntimeError("no more dice")
        return Step(({"role": "user", "content": str(random.random())},), reward=0.0)

    def close(self) -> None:
        Dice.num_open -= 1


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> EpisodeHost:
    monkeypatch.setattr(Dice, "num_open", 0)
    return EpisodeHost(Dice, tool_timeout=1.0, max_chars=100)


def said(answer: dict[str, Any]) -> list[str]:
    return [message["content"] for step in answer["steps"] for message in step["messages"]]


def test_each_turn_draws_its_own_numbers_and_the_same_ones_when_it_is_played_again(host: EpisodeHost) -> None:
    first = host(Job("a", PROMPT, seed=7, actions=ACTIONS[:1]))
    host(Job("b", PROMPT, seed=8, actions=ACTIONS[:1]))  # an episode between two turns of another
    later = host(Job("a", PROMPT, seed=7, actions=ACTIONS, num_known=1))
    again = EpisodeHost(Dice, tool_timeout=1.0, max_chars=100)(Job("a", PROMPT, seed=7, actions=ACTIONS))
    assert first is not None and later is not None and again is not None
    assert "opening" not in later and said(first) + said(later) == said(again)
    assert len({*said(again), again["opening"][0]["content"]}) == 4


def test_an_episode_that_is_not_at_the_known_turn_is_played_again(host: EpisodeHost) -> None:
    host(Job("a", PROMPT, seed=7, actions=ACTIONS[:1]))
    answer = host(Job("a", PROMPT, seed=7, actions=ACTIONS, num_known=2))
    assert answer is not None and "opening" in answer and len(answer["steps"]) == 3
    assert Dice.num_open == 1


def test_an_episode_that_is_ahead_of_the_known_turn_is_played_again(host: EpisodeHost) -> None:
    """Its answer was lost on the way, and the job comes again."""
    first = host(Job("a", PROMPT, seed=7, actions=ACTIONS[:2]))
    again = host(Job("a", PROMPT, seed=7, actions=ACTIONS[:2], num_known=1))
    assert first is not None and first == again and Dice.num_open == 1


def test_an_episode_is_closed_at_its_end_and_after_a_failure(host: EpisodeHost) -> None:
    host(Job("a", PROMPT, actions=ACTIONS[:1]))
    with pytest.raises(RuntimeError, match="no more dice"):
        host(Job("b", PROMPT, actions=(Action("fail", (), (), 0),)))
    assert Dice.num_open == 1
    assert host(Job("a")) is None and Dice.num_open == 0


class Answering:
    """Answers with whatever it is told to."""

    tools = ()
    answer: Any = None
    tool_timeout: float | None = None
    made: list[Any] = []

    def __init__(self) -> None:
        Answering.made.append(self)

    def reset(self, prompt: Prompt, seed: int) -> Any:
        return ("hello", {"content": "x" * 11, "name": "n"})

    def step(self, action: Action) -> Any:
        return Answering.answer

    def close(self) -> None: ...


def answered(answer: Any, **options: Any) -> dict[str, Any]:
    Answering.answer, Answering.made = answer, []
    result = EpisodeHost(Answering, tool_timeout=2.5, max_chars=10, **options)(Job("a", PROMPT, 0, ACTIONS[:1]))
    assert result is not None
    return result


def test_answers_become_plain_data_with_texts_of_bounded_length() -> None:
    tool = {"role": "tool", "name": "f", "content": 12345678901}
    answer = answered(Step((tool, "0123456789"), np.float32(0.5), 1, 0, {3: True}, np.int64(2)))  # pyright: ignore
    assert answer["opening"] == [
        {"role": "user", "content": "hello"},
        {"role": "user", "name": "n", "content": "xxxxx…(cut)xxxxx"},
    ]
    assert answer["steps"] == [
        {
            "messages": [
                {"role": "tool", "name": "f", "content": "12345…(cut)78901"},
                {"role": "user", "content": "0123456789"},
            ],
            "reward": 0.5,
            "done": True,
            "truncated": False,
            "metrics": {"3": 1.0},
            "num_errors": 2,
        }
    ]
    assert json.loads(json.dumps(answer)) == answer
    assert Answering.made[0].tool_timeout == 2.5
    assert answered(Step(("a",)))["steps"][0]["reward"] is None


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("text", "step returned a str"),
        (Step(({"role": "user"},)), "expected a dict with role and content"),
        (Step((3,)), "a message is 3"),
        (Step(("a",), float("inf")), "the reward of a step"),
        (Step(("a",), metrics={"size": float("nan")}), "the metric 'size'"),
    ],
)
def test_answers_of_another_shape_are_failures_that_say_what_was_expected(answer: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError, RewardError), match=message):
        answered(answer)


def test_an_episode_without_actions_is_begun_again() -> None:
    host = EpisodeHost(Dice, tool_timeout=1.0, max_chars=100)
    first, again = (host(Job("a", PROMPT, seed=7)) for _ in range(2))
    assert first is not None and first == again and first["steps"] == [] and Dice.num_open == 1
    host(Job("a"))


def test_threads_leave_the_random_state_of_the_process_alone() -> None:
    random.seed(1)
    expected = random.random()
    random.seed(1)
    answered(Step(("a",)), seeded=False)
    assert random.random() == expected
