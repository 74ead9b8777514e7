"""TRL's environment classes: `reset(**row)`, public methods as tools, and `get_reward()`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from gspo.environments.protocol import Action, Message, Step
from gspo.environments.tools import ToolEnvironment
from gspo.types import Prompt

_NOT_TOOLS = ("reset", "get_reward", "close")


class TrlEnvironment(ToolEnvironment):
    """Serves an object with TRL's methods. `reset` gets the row's columns; its text, if any, opens the conversation.

    `get_reward`, where there is one, is asked after the last turn and gives the reward of the whole.
    """

    def __init__(self, env: Any) -> None:
        super().__init__(tool_methods(env))
        self._env = env

    def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        row = {**prompt.extra, "prompt": [dict(message) for message in prompt.messages]}
        row |= {"answer": prompt.ground_truth, "ground_truth": prompt.ground_truth, "data_source": prompt.data_source}
        opening = self._env.reset(**_accepted(self._env.reset, {**row, "seed": seed}))
        return ({"role": "user", "content": str(opening)},) if opening else ()

    def step(self, action: Action) -> Step:
        step = super().step(action)
        give = getattr(self._env, "get_reward", None)
        if give is None or not (step.done or action.is_last):
            return step
        return Step(step.messages, give(), step.done, num_errors=step.num_errors)

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            close()


def tool_methods(env: Any) -> list[Callable[..., Any]]:
    """The public methods of an object that are tools."""
    methods = inspect.getmembers(env, inspect.ismethod)
    return [method for name, method in methods if not name.startswith("_") and name not in _NOT_TOOLS]


def _accepted(function: Callable[..., Any], values: dict[str, Any]) -> dict[str, Any]:
    """The values for which a function has a parameter."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return values
    return {p.name: values[p.name] for p in parameters if p.name in values}
