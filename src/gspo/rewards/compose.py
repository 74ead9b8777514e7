"""From reward functions to a response's reward: weighted composition, and the reward managers."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import importlib
import itertools
import random
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gspo.rewards import builtin
from gspo.rewards.functions import RewardFunction, RewardSpec, load_function, load_module, parse_spec, wrap_function
from gspo.rewards.protocol import Graded, RewardError
from gspo.rewards.results import as_number, to_json
from gspo.rewards.shaping import overlong_penalty
from gspo.rewards.signatures import Response
from gspo.types import Prompt, Reward, Rollout

Manager = Literal["naive", "dapo", "batch", "prime"]
RewardLike = RewardSpec | RewardFunction | str | Callable[..., Any] | Mapping[str, Any]

DEFAULT = RewardSpec("default")
"""The built-in that belongs to each row's data source."""


@dataclass(frozen=True, slots=True)
class Overlong:
    """DAPO's soft overlong punishment: its limit, the buffer before it, and the penalty at the limit."""

    max_length: int
    buffer: int
    factor: float = 1.0
    log: bool = False  # whether the penalty becomes a metric of its own


class Grader:
    """Grades responses with one reward, or with a weighted sum of several. Holds no state between calls."""

    def __init__(self, rewards: Sequence[RewardSpec | RewardFunction]) -> None:
        assert rewards
        self.rewards = [_resolve(item) for item in rewards]

    def grade(self, prompt: Prompt, responses: Sequence[Response]) -> list[Graded]:
        """A Reward, or the text of a failure, for each response, in order. Never raises."""
        try:
            functions = [item(prompt.data_source) if callable(item) else item for item in self.rewards]
        except RewardError as error:
            return [f"row {prompt.uid!r}, response {response.index}: {error}" for response in responses]
        columns = [function.grade(prompt, responses) for function in functions]
        return [combine(functions, graded) for graded in zip(*columns)]


def build_grading(
    specs: Sequence[RewardSpec | RewardFunction], preload: Sequence[str] = (), seeded: bool = True
) -> tuple[Callable[[tuple[Prompt, list[Response]]], list[dict[str, Any]]], dict[str, Any]]:
    """The handler of a pool's workers, (prompt, responses) to results as plain data; and what the scorer must know.

    `seeded` sets Python's and numpy's global random state from the row and the responses, so that a reward function
    that draws random numbers gives the same result in every worker and after a resume. It must be False in the
    trainer's own process, whose random state it would change.
    """
    for module in preload:
        if module.endswith(".py"):
            load_module(module)
            continue
        # An extra may not be installed: the rows that need it fail with its name.
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    grader = Grader(specs)

    def handle(payload: tuple[Prompt, list[Response]]) -> list[dict[str, Any]]:
        prompt, responses = payload
        if seeded:
            _seed(prompt.uid, responses)
        return [to_json(graded) for graded in grader.grade(prompt, responses)]

    functions = [item for item in grader.rewards if isinstance(item, RewardFunction)]
    whole_group = any(function.needs_whole_group for function in functions)
    return handle, {"whole_group": whole_group, "names": [f.name + f.where for f in functions]}


def _seed(uid: str, responses: Sequence[Response]) -> None:
    digest = hashlib.blake2b(digest_size=4)
    for text in (uid, *responses):
        digest.update(text.encode(errors="surrogatepass") + b"\0")
    seed = int.from_bytes(digest.digest(), "big")
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def combine(functions: Sequence[RewardFunction], graded: Sequence[Graded]) -> Graded:
    """The weighted sum of one response's rewards. A failure when one of them failed, or when the sum is not finite.

    With several rewards the first `acc` that is not None counts, and each part's score becomes the metric
    `reward/<name>`. A part of weight 0 is only logged, and left out where it failed.
    """
    failures = [(function.weight, result) for function, result in zip(functions, graded) if isinstance(result, str)]
    if failures and (len(failures) == len(functions) or any(weight for weight, _ in failures)):
        return next((text for weight, text in failures if weight), failures[0][1])
    parts = [(function, part) for function, part in zip(functions, graded) if isinstance(part, Reward)]
    if len(functions) == 1 and functions[0].weight == 1.0:
        return parts[0][1]
    try:
        weighted = sum(function.weight * part.score for function, part in parts)
        score = as_number(weighted, f"the weighted sum of {', '.join(f.name for f in functions)}")
    except RewardError as error:
        return str(error)
    extra: dict[str, float] = {}
    scores: dict[str, float] = {}
    notes: dict[str, Any] = {}
    for function, part in parts:
        extra |= part.extra
        notes |= part.notes
        scores[unique_name(f"reward/{function.name}", scores)] = part.score
    acc = next((part.acc for _, part in parts if part.acc is not None), None)
    noise = sum(abs(function.weight) * part.noise for function, part in parts)
    return Reward(score, acc, extra | scores, noise=noise, notes=notes)


def unique_name(name: str, taken: Collection[str]) -> str:
    """The name itself, or with the first number that makes it a new one: score, score_2, score_3."""
    names = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
    return next(each for each in names if each not in taken)


@dataclass(frozen=True, slots=True)
class RewardScale:
    """clip((score + bias)·scale, ±clip): how a score becomes a reward. Its noise is scaled, the accuracy stays."""

    scale: float = 1.0
    bias: float = 0.0
    clip: float | None = None

    def apply(self, reward: Reward) -> Reward:
        score = (reward.score + self.bias) * self.scale
        if self.clip is not None:
            score = min(max(score, -self.clip), self.clip)
        return dataclasses.replace(reward, score=score, noise=reward.noise * abs(self.scale))


def manage(reward: Reward, num_tokens: int, manager: Manager, overlong: Overlong | None) -> Reward:
    """`naive` leaves the reward unchanged. `dapo` sets a missing `acc` to the score, then adds the overlong penalty."""
    if manager != "dapo":
        return reward
    acc = reward.score if reward.acc is None else reward.acc
    if overlong is None:
        return dataclasses.replace(reward, acc=acc)
    penalty = overlong_penalty(num_tokens, overlong.max_length, overlong.buffer, overlong.factor)
    extra = dict(reward.extra)
    if overlong.log:
        extra |= {"overlong_reward": penalty, "overlong": float(penalty < 0)}
    return dataclasses.replace(reward, score=reward.score + penalty, acc=acc, extra=extra)


@dataclass(frozen=True, slots=True)
class Finishing:
    """What becomes of a rollout's graded response: the reward manager, then the scale."""

    manager: Manager = "naive"
    overlong: Overlong | None = None
    scale: RewardScale | None = None

    def apply(self, rollout: Rollout, graded: Graded) -> Rollout:
        """The rollout with its reward, or with a failure and no reward."""
        if isinstance(graded, str):
            return rollout.with_reward(None, graded)
        managed = manage(graded, rollout.num_model_tokens, self.manager, self.overlong)
        return rollout.with_reward(managed if self.scale is None else self.scale.apply(managed))


PLAIN = Finishing()


def as_specs(reward: RewardLike | Sequence[RewardLike] | None) -> list[RewardSpec | RewardFunction]:
    """One or several rewards, in any form that `make_scorer` accepts, as specs (by name) or loaded functions."""
    if reward is None:
        return [DEFAULT]
    rewards: Any = reward if isinstance(reward, (list, tuple)) else [reward]
    if not rewards:
        raise RewardError("the list of rewards is empty, expected at least one")
    return [_as_spec(item) for item in rewards]


def _as_spec(item: RewardLike) -> RewardSpec | RewardFunction:
    if isinstance(item, (RewardSpec, RewardFunction)):
        return item
    if isinstance(item, str):
        return parse_spec(item)
    if isinstance(item, Mapping):
        if "name" not in item:
            raise RewardError(
                f"reward.functions: {dict(item)} has no `name`, the name of the function or built-in reward"
            )
        if other := sorted(set(item) - {"name", "path", "weight", "kwargs"}):
            raise RewardError(
                f"reward.functions: {dict(item)} has {', '.join(other)}; only name, path, weight and kwargs are known"
            )
        return RewardSpec(**item, key="reward.functions: path")
    if callable(item):
        return wrap_function(item)
    raise RewardError(f"the reward is {item!r}, expected a function, a name or a spec")


def _resolve(item: RewardSpec | RewardFunction) -> RewardFunction | Callable[[str], RewardFunction]:
    if isinstance(item, RewardFunction):
        return item
    if item.path is not None:
        return load_function(item)
    if item.name == DEFAULT.name:
        return functools.cache(lambda source: _default(source, item))
    entry = builtin.by_name(item.name)
    return wrap_function(entry.fn, name=entry.name, weight=item.weight, kwargs=item.kwargs)


def _default(source: str, spec: RewardSpec) -> RewardFunction:
    """`spec.kwargs` maps a built-in's name to its own settings: {"code": {"timeout": 5}}."""
    entry = builtin.by_source(source)
    return wrap_function(entry.fn, name=entry.name, weight=spec.weight, kwargs=spec.kwargs.get(entry.name))
