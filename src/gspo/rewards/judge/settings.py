"""The settings of a judge, and the rubric that it grades by."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from typing import Any, Literal

from gspo.paths import user_path
from gspo.rewards.protocol import RewardError

Kind = Literal["reference", "rubric", "score", "rank"]
View = Literal["last_reply", "full_rollout"]
RUBRIC = "reward.judge.rubric"
MAX_WEIGHT = 1e6  # of a criterion


@dataclass(frozen=True, slots=True)
class Criterion:
    """One line of a rubric: what is asked, how much it counts, and its choices from worst to best."""

    name: str
    text: str
    weight: float
    choices: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class JudgeSettings:
    """How a judge is asked. The key is in the environment variable `api_key_env`, and nowhere else."""

    base_url: str
    model: str
    kind: Kind = "score"
    api_key_env: str = "OPENAI_API_KEY"
    rubric: tuple[Criterion, ...] = ()
    prompt: str | None = None  # a template that replaces the built-in question
    view: View = "last_reply"
    max_score: float = 10.0  # the best score of kind `score`
    samples: int = 1
    temperature: float = 0.0
    max_tokens: int = 1024  # of a reply
    timeout: float = 60.0
    retries: int = 4
    max_concurrent: int = 32
    requests_per_minute: float = 0.0
    tokens_per_minute: float = 0.0
    cache: str | None = None
    max_tokens_spent: int = 0


def read_rubric(path: str) -> tuple[Criterion, ...]:
    """The criteria of a TOML file: `[[criteria]]` with name, text, choices from worst to best, and weight (1)."""
    try:
        table = tomllib.loads(user_path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise RewardError(f"{RUBRIC}={path!r} cannot be read: {error}") from error
    criteria = table.get("criteria")
    if not isinstance(criteria, list) or not criteria:
        raise RewardError(f"{RUBRIC}={path!r} has no criteria; expected tables [[criteria]] with name, text, choices")
    if other := sorted(set(table) - {"criteria"}):
        raise RewardError(f"{RUBRIC}={path!r} has {', '.join(other)}; expected only tables [[criteria]]")
    found = tuple(_criterion(item, f"{RUBRIC}={path!r}: criterion {i}") for i, item in enumerate(criteria, 1))
    names = [criterion.name for criterion in found]
    if len(set(names)) < len(names):
        raise RewardError(f"{RUBRIC}={path!r} has two criteria of one name; names are {', '.join(names)}")
    return found


def _criterion(item: Any, where: str) -> Criterion:
    if not isinstance(item, dict) or set(item) - {"name", "text", "weight", "choices"}:
        raise RewardError(f"{where} is {item!r}; expected name, text, choices and optionally weight")
    name, text, choices, weight = (item.get(key) for key in ("name", "text", "choices", "weight"))
    weight = 1.0 if weight is None else weight
    if not isinstance(name, str) or not name or not isinstance(text, str) or not text:
        raise RewardError(f"{where} has no name or text; expected both")
    if name == "reason":
        raise RewardError(f"{where} has name='reason', under which the judge gives its reason; choose another name")
    if not isinstance(choices, list) or len(set(map(str, choices))) < 2 or len(set(map(str, choices))) < len(choices):
        raise RewardError(
            f"{where} ({name}) has choices={choices!r}; expected at least two different ones, worst first"
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= MAX_WEIGHT:
        raise RewardError(
            f"{where} ({name}) has weight={weight!r}; expected a number greater than 0, up to {MAX_WEIGHT:g}"
        )
    return Criterion(name, text, float(weight), tuple(map(str, choices)))
