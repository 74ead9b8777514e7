"""The rewards that a config adds up: functions, judges, the reward model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gspo.config.loading import tree
from gspo.config.loading.coerce import WrongType, coerce
from gspo.config.schema import TrainerConfig

FUNCTION_KEYS = ("name", "path", "weight", "kwargs")
OTHER_KEYS = {"judge": ("judge", "name", "weight"), "model": ("model", "weight")}


@dataclass(frozen=True, slots=True)
class JudgePart:
    """A judge among the rewards; `replaced` are keys that differ from `reward.judge`."""

    name: str
    weight: float
    replaced: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RewardParts:
    """The rewards of a config by kind. `model` is the weight of the reward model, None without one."""

    functions: list[dict[str, Any]]
    judges: list[JudgePart]
    model: float | None
    model_path: str | None

    @property
    def only_functions(self) -> bool:
        return not self.judges and self.model is None


def reward_parts(config: TrainerConfig) -> RewardParts:
    """The rewards of a config, for rules and texts about it."""
    reward, model = config.reward, config.reward_model
    judge = reward.judge.weight if reward.judge.base_url is not None else None
    return split_rewards(reward.functions, judge, model.weight if model.enable else None, model.path)


def split_rewards(
    entries: Sequence[dict[str, Any]], judge: float | None, model: float | None, model_path: str | None
) -> RewardParts:
    """The entries of `reward.functions` by kind, and the judge and the model that are on without an entry.

    `judge` and `model` are the weights of those, None where they are off.
    """
    functions: list[dict[str, Any]] = []
    judges: list[JudgePart] = []
    models: list[float] = []
    for entry in entries:
        weight = entry.get("weight", 1.0)
        weight = float(weight) if _is_number(weight) else 1.0  # refused by `entry_problem`
        if "judge" in entry:
            replaced, _ = judge_values(entry["judge"] if isinstance(entry["judge"], dict) else {})
            judges.append(JudgePart(str(entry.get("name", "judge")), weight, replaced))
        elif "model" in entry:
            models.append(weight)
            model_path = entry["model"] if isinstance(entry["model"], str) else model_path
        else:
            functions.append(entry)
    if judge is not None and not judges:
        judges.append(JudgePart("judge", judge, {}))
    return RewardParts(functions, judges, models[0] if models else model, model_path)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def entry_problem(entry: dict[str, Any], judge_keys: tuple[str, ...]) -> str | None:
    """What is wrong with an entry of `reward.functions`; None if nothing."""
    kind = next((kind for kind in OTHER_KEYS if kind in entry), None)
    allowed = FUNCTION_KEYS if kind is None else OTHER_KEYS[kind]
    if kind is None and "name" not in entry:
        return f"{entry} has no `name`, `judge` or `model`"
    unknown = sorted(set(entry) - set(allowed))
    if unknown:
        return f"{entry} has {', '.join(unknown)}; expected only {', '.join(allowed)}"
    weight = entry.get("weight", 1.0)
    if not _is_number(weight):
        return f"{entry} has weight={weight!r}; expected a number"
    value = entry.get(kind) if kind else None
    if value is False:
        return f"{entry} has {kind}=False; expected true, or no such entry"
    if kind == "model" and not isinstance(value, str | bool | dict | type(None)):
        return f"{entry} has model={value!r}; expected a folder, a hub name, or {{}} for reward_model.path"
    if kind == "judge" and value is not None and not isinstance(value, dict | bool):
        return f"{entry} has judge={value!r}; expected {{}} or keys of reward.judge"
    if kind == "judge" and isinstance(value, dict) and (wrong := sorted(set(value) - set(judge_keys))):
        return f"{entry} has {', '.join(wrong)} in judge; its keys are {', '.join(judge_keys)}"
    if kind == "judge" and isinstance(value, dict) and (problem := judge_values(value)[1]) is not None:
        return f"{entry} has {problem}"
    return None


def judge_values(given: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The values of a judge's own keys, converted as those of `reward.judge` are, and what is wrong with one of them."""
    values: dict[str, Any] = {}
    problem = None
    for name, value in given.items():
        leaf = tree.leaf_of(f"reward.judge.{name}")
        try:
            values[name] = value if leaf is None else coerce(value, leaf.type)
        except WrongType:
            problem = f"{name}={value!r} in judge; expected {leaf.type_name if leaf else ''}"
            continue
        violation = None if leaf is None else leaf.info.violation(values[name])
        problem = problem if violation is None else f"{name}={value!r} in judge; {violation}"
    return values, problem
