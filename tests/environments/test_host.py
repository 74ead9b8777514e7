"""The episodes of one worker: played on, played again where the worker is behind, drawn from the seed, and closed."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gspo.environments.host import EpisodeHost, Job
from gspo.environments.protocol import Action, Step
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


def test_an_episode_is_closed_at_its_end_and_after_a_failure(host: EpisodeHost) -> None:
    host(Job("a", PROMPT, actions=ACTIONS[:1]))
    with pytest.raises(RuntimeError, match="no more dice"):
        host(Job("b", PROMPT, actions=(Action("fail", (), (), 0),)))
    assert Dice.num_open == 1
    assert host(Job("a")) is None and Dice.num_open == 0
