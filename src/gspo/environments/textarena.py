"""`environment.name=textarena:ID`: the games for one player of the package `textarena`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo.environments.protocol import Action, EnvironmentProblem, Message, Step
from gspo.types import Prompt

PLAYER = 0


class TextArena:
    """One game. The model sees what is new since its last turn, without its own actions.

    The reward of the game comes with its last turn; `acc` is whether it is the full reward of 1. `kwargs` are the
    game's own.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, name: str, **kwargs: Any) -> None:
        try:
            import textarena
        except ImportError as error:
            raise EnvironmentProblem(
                f"environment.name=textarena:{name} needs the package textarena: pip install 'gspo[textarena]'"
            ) from error
        try:
            self._game = textarena.make(name, **kwargs)
        except ValueError as error:
            raise EnvironmentProblem(f"environment.name=textarena:{name}: {error}") from error
        # Wrappers of actions stay; those of observations repeat everything that was said before.
        self._inner = self._game
        while isinstance(self._inner, textarena.Wrapper):
            self._inner = self._inner.env
        self._own_action = textarena.ObservationType.PLAYER_ACTION
        self._name = name

    def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        try:
            self._game.reset(num_players=1, seed=seed % 2**31)
        except AssertionError as error:
            raise EnvironmentProblem(
                f"environment.name=textarena:{self._name} is no game for one player: {error}"
            ) from error
        return self._news()

    def step(self, action: Action) -> Step:
        done, _ = self._game.step(str(action))
        if not done:
            return Step(self._news())
        reward = float((self._inner.state.rewards or {}).get(PLAYER, 0.0))
        return Step(self._news(), reward, done=True, metrics={"acc": float(reward >= 1.0)})

    def close(self) -> None:
        """Nothing is held."""

    def _news(self) -> tuple[Message, ...]:
        """What the game has said since the last time."""
        _, entries = self._inner.get_observation()
        texts = [text for sender, text, kind in entries if sender != PLAYER and kind != self._own_action]
        return ({"role": "user", "content": "\n".join(texts).strip()},) if texts else ()
