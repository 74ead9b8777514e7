"""Built-in rewards by name, and which of them grades the rows of a data source.

A built-in has our own signature, `(prompt, response) -> float | Reward`. One marked `cheap` does plain
string operations in time linear in the response, so it runs in the trainer's process; others run in the worker pool.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any

from gspo.registry import Registry
from gspo.rewards.protocol import RewardError
from gspo.rewards.shaping import format_reward, length_penalty, repetition_penalty
from gspo.rewards.signatures import Response
from gspo.types import Prompt, Reward


@dataclass(frozen=True, slots=True)
class Builtin:
    """A registered reward. `sources` are the data sources (or "prefix*") that it grades when no reward is named."""

    fn: Callable[..., Any]
    name: str
    sources: tuple[str, ...] = ()
    cheap: bool = False
    preload: tuple[str, ...] = ()  # modules worth importing once, before workers are forked


REWARDS: Registry[Builtin] = Registry("reward", error=RewardError)


def reward(
    name: str, *, sources: tuple[str, ...] = (), cheap: bool = False, preload: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a reward function under a name, and as the default of its data sources.

    Workers import its module too, by name or, for a plugin, from its file.
    """

    def register(fn: Callable[..., Any]) -> Callable[..., Any]:
        REWARDS.add(name, Builtin(fn, name, (name, *sources), cheap, preload), source=fn)
        return fn

    return register


def registering_modules() -> list[str]:
    """Modules, or files of plugins, that registered rewards: a worker imports them to know the same names."""
    functions = [e.fn for e in REWARDS.items() if e.fn.__module__ not in (__name__, "__main__")]
    return sorted({_module_or_file(fn) for fn in functions})


def _module_or_file(fn: Callable[..., Any]) -> str:
    """The name of a function's module if a worker can import it by name, else the path of its file."""
    package = fn.__module__.partition(".")[0]
    if PathFinder.find_spec(package) is None:
        return inspect.getsourcefile(inspect.unwrap(fn)) or fn.__module__
    return fn.__module__


def by_name(name: str) -> Builtin:
    """The built-in of that name; RewardError lists the known names."""
    if name not in REWARDS:
        hint = f"did you mean {near!r}? " if (near := REWARDS.nearest(name)) else ""
        raise RewardError(
            f"there is no built-in reward {name!r}; {hint}known names are {_names()}. "
            f'For a function of your own write "file.py:function"'
        )
    return REWARDS.get(name)


def by_source(data_source: str) -> Builtin:
    """The built-in that grades the rows of a data source; RewardError says how to name your own function."""
    for entry in REWARDS.items():
        if data_source in entry.sources:
            return entry
    for entry in REWARDS.items():
        if any(s.endswith("*") and data_source.startswith(s[:-1]) for s in entry.sources):
            return entry
    if data_source == "unknown":
        raise RewardError(
            "the row has no data_source, so no built-in reward is chosen for it; set custom_reward_function.path and .name, "
            f"reward.functions=[{{name: exact}}], or give the rows a data_source: {_names()}"
        )
    raise RewardError(
        f"no built-in reward grades data_source {data_source!r}; set custom_reward_function.path and .name, "
        f"or use one of the data sources {_names()}"
    )


def _names() -> str:
    return ", ".join(sorted(REWARDS.names()))


@reward("arithmetic", cheap=True)
def arithmetic(prompt: Prompt, response: Response) -> Reward:
    """1 when the text after the last `;` is the sum, in plain digits."""
    from gspo.data.tasks.arithmetic import score

    right = score(response, prompt.ground_truth)
    return Reward(right, acc=right)


@reward("countdown", cheap=True)
def countdown(prompt: Prompt, response: Response) -> Reward:
    """1 when the expression between `<answer>` and `</answer>` uses each of the row's numbers once and makes the target."""
    from gspo.data.tasks.countdown import score

    right = score(response, int(prompt.ground_truth), prompt.extra["numbers"])
    return Reward(right, acc=right)


@reward("exact", sources=("calculator",), cheap=True)
def exact(prompt: Prompt, response: Response) -> Reward:
    """1 when the response equals the ground truth, apart from white space around them."""
    right = float(response.strip() == str(prompt.ground_truth).strip())
    return Reward(right, acc=right)


@reward("gsm8k", sources=("openai/gsm8k", "reasoning"), cheap=True)
def gsm8k(prompt: Prompt, response: Response) -> Reward:
    """Grade a number (after `####`, boxed, or the last one) against the row's; no symbolic comparison."""
    from gspo.rewards.graders.math import grade_math

    return grade_math(response, prompt.ground_truth, symbolic=False)


@reward(
    "math",
    sources=(
        "math500",
        "HuggingFaceH4/MATH-500",
        "lighteval/MATH",
        "DigitalLearningGmbH/MATH-lighteval",
        "math_dapo",
        "aime*",
    ),
    preload=("math_verify",),
)
def math(prompt: Prompt, response: Response) -> Reward:
    """Grade the final answer: our parser for numbers, math-verify for symbolic answers."""
    from gspo.rewards.graders.math import grade_math

    return grade_math(response, prompt.ground_truth)


@reward("code", sources=("codecontests", "apps", "codeforces", "taco", "livecodebench"))
def code(
    prompt: Prompt,
    response: Response,
    *,
    timeout: float | None = None,
    memory: int | None = None,
    level: int | None = None,
    allow_unsandboxed: bool = False,
) -> Reward:
    """Run the response's program against the row's tests in the sandbox; the tests are the ground truth."""
    from gspo.rewards.graders.code import grade_code

    limits = {"timeout": timeout, "memory": memory}
    limits = {name: value for name, value in limits.items() if value is not None}
    return grade_code(str(response), prompt.ground_truth, sandbox=_sandbox(level, allow_unsandboxed), **limits)


@functools.cache
def _sandbox(level: int | None, allow_unsandboxed: bool) -> Any:
    """The sandbox of this worker. One fork server is enough: a worker runs one program at a time."""
    from gspo.sandbox import Sandbox

    return Sandbox(level, allow_unsandboxed=allow_unsandboxed, num_servers=1)


@reward("reasoning_gym", preload=("reasoning_gym",))
def reasoning_gym(prompt: Prompt, response: Response) -> Reward:
    """The score that the reasoning-gym package gives, with its calls of `eval` replaced by safe ones."""
    from gspo.rewards.graders.reasoning_gym import grade_gym

    return grade_gym(response, prompt.ground_truth, prompt.extra)


@reward("format", cheap=True)
def formatted(prompt: Prompt, response: Response, *, tags: tuple[str, ...] = ("think", "answer")) -> float:
    """1 when the response is exactly `<think>…</think>` followed by `<answer>…</answer>`."""
    return format_reward(response, tags)


@reward("repetition", cheap=True)
def repetition(prompt: Prompt, response: Response, *, ngram: int = 4) -> float:
    """0 without repeated phrases, down to -1 when all of them repeat."""
    return repetition_penalty(response, ngram)


@reward("length", cheap=True)
def length(prompt: Prompt, response: Response, *, max_length: int | None = None, free: int = 0) -> float:
    """0 up to `free` tokens, falling to -1 at `max_length`, which must be given."""
    if max_length is None:
        raise RewardError("it needs max_length: reward.functions=[{name: length, kwargs: {max_length: 512}}]")
    return length_penalty(response.num_tokens, max_length, free)
