"""Environments of other systems, recognised by their shape and served through our protocol.

| shape | recognised by |
|---|---|
| gspo | `reset(prompt, seed)` and `step(action)`, which returns a Step |
| gymnasium, GEM | `reset(seed=…)` returns (observation, info); `step(action)` returns five values |
| skyrl-gym | `init(prompt)`; `step(text)` returns a dict with `observations`, `reward` and `done` |
| TRL | `reset(**row)`, no `step`; public methods are tools; `get_reward()` |
| functions | a list of functions: tools |
"""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gspo.environments.protocol import Action, Environment, EnvironmentProblem, Message, Step
from gspo.environments.tools import ToolEnvironment
from gspo.environments.trl import TrlEnvironment, tool_methods
from gspo.rewards.protocol import RewardError
from gspo.rewards.results import as_number
from gspo.types import Prompt

_EXPECTED = (
    "expected reset(prompt, seed) and step(action); gymnasium's reset(seed=…) and step(action); skyrl-gym's init(prompt) and "
    "step(text); TRL's reset(**row) with methods as tools; or a list of functions"
)

MAX_DIGITS = 18  # of a number that a model writes as its action


def as_environment(made: Any, title: str) -> Environment:
    """An object of any accepted shape as an Environment."""
    if isinstance(made, list):
        return ToolEnvironment(made)
    reset, step = getattr(made, "reset", None), getattr(made, "step", None)
    if callable(getattr(made, "init", None)) and callable(step):
        return SkyRl(made)
    if callable(reset) and step is None and tool_methods(made):
        return TrlEnvironment(made)
    if not callable(reset) or not callable(step):
        raise EnvironmentProblem(f"environment {title!r} is of type {type(made).__name__}; {_EXPECTED}")
    names = list(inspect.signature(reset).parameters)
    if names[:2] == ["prompt", "seed"]:
        if not hasattr(made, "tools"):
            made.tools = ()
        if not hasattr(made, "close"):
            made.close = lambda: None
        return made
    if "seed" in names or _takes_any(reset):
        return Gymnasium(made)
    raise EnvironmentProblem(f"environment {title!r} has reset({', '.join(names)}); {_EXPECTED}")


def _takes_any(function: Callable[..., Any]) -> bool:
    return any(p.kind is p.VAR_KEYWORD for p in inspect.signature(function).parameters.values())


class Gymnasium:
    """An environment of gymnasium, or with its methods (GEM): observations are shown as text.

    A discrete action is the last whole number of the turn's text. A text without a possible action is answered with an
    error that the model sees, and the environment is not stepped. Any other action space gets the text itself.
    """

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, env: Any) -> None:
        self._env = env
        space = getattr(env, "action_space", None)
        self._num_actions: int | None = getattr(space, "n", None)
        self._first_action = int(getattr(space, "start", 0))

    def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        seed %= 2**31  # gymnasium passes it to numpy
        observation, _ = self._env.reset(seed=seed)
        return ({"role": "user", "content": str(observation)},)

    def step(self, action: Action) -> Step:
        chosen: Any = str(action)
        if self._num_actions is not None:
            first, last = self._first_action, self._first_action + int(self._num_actions) - 1
            found = re.findall(r"-?\d+" if first < 0 else r"\d+", chosen)
            number = int(found[-1]) if found and len(found[-1]) <= MAX_DIGITS else None
            if number is None or not first <= number <= last:
                answer = f"error: expected a number from {first} to {last}"
                return Step(({"role": "user", "content": answer},), num_errors=1)
            chosen = number
        observation, reward, terminated, truncated, info = self._env.step(chosen)
        message = {"role": "user", "content": str(observation)}
        return Step((message,), float(reward), bool(terminated), bool(truncated), _numbers_of(info))

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            close()


class SkyRl:
    """An environment of skyrl-gym: it gets the chat, may change it, and answers texts with dictionaries."""

    tools: Sequence[Mapping[str, Any]] = ()

    def __init__(self, env: Any) -> None:
        self._env = env

    def reset(self, prompt: Prompt, seed: int) -> Sequence[Message]:
        asked = [dict(message) for message in prompt.messages]
        result = self._env.init([dict(message) for message in asked])
        chat = result[0] if isinstance(result, tuple) else result
        if list(chat[: len(asked)]) != asked:
            raise EnvironmentProblem("init changed the messages of the prompt; expected it to add messages at most")
        return tuple(chat[len(asked) :])

    def step(self, action: Action) -> Step:
        answer = self._env.step(str(action))
        found = _numbers_of(answer.get("metadata") or {})
        return Step(tuple(answer["observations"]), answer.get("reward"), bool(answer.get("done")), metrics=found)

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            close()


def _numbers_of(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among values of all kinds, numpy's included."""
    found = {}
    for key, value in values.items():
        with contextlib.suppress(RewardError):
            found[key] = as_number(value)
    return found
