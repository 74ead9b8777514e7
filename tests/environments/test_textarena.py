"""What a game of TextArena is given and what the model sees of it. The package is replaced."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from gspo.environments.protocol import Action, EnvironmentProblem
from gspo.environments.textarena import TextArena
from gspo.types import Prompt

PROMPT = Prompt("p", (), ())
ACTION, GAME = "action", "game"


class Game:
    """A game that says what `news` has and ends with `rewards`."""

    def __init__(self) -> None:
        self.news: list[tuple[int, str, str]] = []
        self.done, self.players = False, 1
        self.seeds: list[int] = []
        self.state = SimpleNamespace(rewards=None)

    def reset(self, *, num_players: int, seed: int) -> None:
        assert num_players == self.players, "2 players"
        self.seeds.append(seed)

    def get_observation(self) -> tuple[int, list[tuple[int, str, str]]]:
        news, self.news = self.news, []
        return 0, news

    def step(self, text: str) -> Any:
        raise AssertionError("the wrapper is stepped")


class Wrapper:
    """A wrapper of actions, as those of the package."""

    def __init__(self, env: Any) -> None:
        self.env, self.texts = env, []

    def reset(self, **options: Any) -> None:
        self.env.reset(**options)

    def get_observation(self) -> Any:
        raise AssertionError("observations of wrappers repeat everything")

    def step(self, text: str) -> tuple[bool, dict[str, Any]]:
        inner = self.env
        while isinstance(inner, Wrapper):
            inner = inner.env
        self.texts.append(text)
        return inner.done, {}


@pytest.fixture
def game(monkeypatch: pytest.MonkeyPatch) -> Game:
    game = Game()

    def make(name: str, **kwargs: Any) -> Any:
        if name != "Guess-v0":
            raise ValueError(f"no game {name}")
        assert kwargs == {"size": 3}
        return Wrapper(Wrapper(game))

    package = SimpleNamespace(make=make, Wrapper=Wrapper, ObservationType=SimpleNamespace(PLAYER_ACTION=ACTION))
    monkeypatch.setitem(sys.modules, "textarena", package)
    return game


def test_the_model_sees_what_is_new_without_its_own_words(game: Game) -> None:
    environment = TextArena("Guess-v0", size=3)
    game.news = [(-1, " Guess a number.", GAME), (-1, "It is small. ", GAME)]
    assert environment.reset(PROMPT, seed=2**31 + 9) == ({"role": "user", "content": "Guess a number.\nIt is small."},)
    assert game.seeds == [9]
    game.news = [
        (0, "my thought", GAME),
        (0, "[4]", ACTION),
        (-1, "[4]", ACTION),
        (-1, "higher", GAME),
        (1, "ha", GAME),
    ]
    step = environment.step(Action("I say [4]"))
    assert step.messages == ({"role": "user", "content": "higher\nha"},)
    assert (step.reward, step.done, step.metrics) == (None, False, {})
    assert environment.step(Action("x")).messages == () and environment._game.texts == ["I say [4]", "x"]
    assert tuple(environment.tools) == () and environment.close() is None


@pytest.mark.parametrize(
    ("rewards", "reward", "acc"),
    [({0: 1.0}, 1.0, 1.0), ({0: 0.4, 1: 1.0}, 0.4, 0.0), ({0: 2}, 2.0, 1.0), ({1: 1.0}, 0.0, 0.0), (None, 0.0, 0.0)],
)
def test_the_reward_is_the_players_and_only_a_full_one_is_accurate(
    game: Game, rewards: Any, reward: float, acc: float
) -> None:
    environment = TextArena("Guess-v0", size=3)
    environment.reset(PROMPT, seed=0)
    game.done, game.state.rewards, game.news = True, rewards, [(-1, "over", GAME)]
    step = environment.step(Action("[4]"))
    assert (step.reward, step.done, step.metrics) == (reward, True, {"acc": acc})
    assert step.messages == ({"role": "user", "content": "over"},)


def test_unknown_games_and_games_for_others_are_refused(game: Game, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentProblem, match=r"environment\.name=textarena:Chess-v0: no game Chess-v0"):
        TextArena("Chess-v0", size=3)
    game.players = 2
    with pytest.raises(EnvironmentProblem, match="textarena:Guess-v0 is no game for one player: 2 players"):
        TextArena("Guess-v0", size=3).reset(PROMPT, 0)
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(EnvironmentProblem, match="needs the package textarena: pip install"):
        TextArena("Guess-v0")
