"""Environments for tests. This module imports little: worker processes load it."""

from __future__ import annotations

import os
import time
from typing import Any

from gspo.environments.builtin import Calculator
from gspo.environments.protocol import Action, Step
from gspo.types import Prompt


class Echo:
    """Says how long each turn was; the reward is a share of it; over after `num_turns`."""

    tools = ()

    def __init__(self, num_turns: int = 3) -> None:
        self._num_turns = num_turns

    def reset(self, prompt: Prompt, seed: int) -> Any:
        self._turn, self._seed = 0, seed
        return ()

    def step(self, action: Action) -> Step:
        assert action.turn == self._turn, "an episode must be played in order"
        self._turn += 1
        message = {"role": "user", "content": f"{len(action)}.{self._seed % 10}"}
        return Step((message,), len(action) / 8, self._turn == self._num_turns, metrics={"size": len(action)})

    def close(self) -> None: ...


class Opening(Echo):
    """As Echo, with a first message that depends on the seed."""

    def reset(self, prompt: Prompt, seed: int) -> Any:
        super().reset(prompt, seed)
        return ({"role": "user", "content": f"go {seed % 100}"},)


class Unsteady(Echo):
    """Answers with the process that it runs in, or rewards by it: played again elsewhere, it does not repeat itself."""

    def __init__(self, how: str = "answer") -> None:
        super().__init__()
        self._how = how

    def step(self, action: Action) -> Step:
        step, process = super().step(action), os.getpid()
        if self._how == "reward":
            return Step(step.messages, float(process), step.done)
        return Step(({"role": "user", "content": str(process)},), step.reward, step.done)


class Faulty(Echo):
    """Fails in the way that `how` names, on the turn with number `turn` of rows whose number is odd."""

    def __init__(self, how: str = "raise", turn: int = 1, every: int = 2) -> None:
        super().__init__()
        self._how, self._bad_turn, self._every = how, turn, every

    def reset(self, prompt: Prompt, seed: int) -> Any:
        self._is_bad = int(prompt.uid.strip("p")) % self._every == self._every - 1
        return super().reset(prompt, seed)

    def step(self, action: Action) -> Step:
        step = super().step(action)
        if not self._is_bad or action.turn != self._bad_turn:
            return step
        if self._how == "hang":
            time.sleep(3600)
        if self._how == "die":
            os._exit(3)
        if self._how == "nan":
            return Step(step.messages, float("nan"))
        if self._how == "flood":
            return Step(({"role": "user", "content": "x" * 10_000_000},), 0.5)
        if self._how == "silent":
            return Step()
        raise RuntimeError("the board is gone")


def Calculating() -> Any:
    """The built-in calculator."""
    return Calculator()
