"""What a reward function may return, as a Reward; and the plain form in which a worker process sends results."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gspo.rewards.protocol import Graded, RewardError
from gspo.types import Reward

_SHOWN = 200


def as_number(value: Any, what: str = "the score") -> float:
    """A finite float from a bool, int, float or anything with `.item()` (numpy, torch); else RewardError."""
    if not isinstance(value, (bool, int, float)) and hasattr(value, "item"):
        try:
            value = value.item()
        except (TypeError, ValueError, RuntimeError) as error:
            raise RewardError(f"{what} is {_show(value)}, expected one number") from error
    if not isinstance(value, (bool, int, float)):
        raise RewardError(f"{what} is {_show(value)} ({type(value).__name__}), expected a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise RewardError(f"{what} is too large for a float") from error
    if not math.isfinite(number):
        raise RewardError(f"{what} is {number}, expected a finite number")
    return number


def as_reward(value: Any) -> Reward:
    """A Reward from the result of a reward function: a number, a Reward, or a dict with "score" (and "acc").

    Other numeric keys of a dict become metrics; texts and None among them are left out, since a metric is a number.
    """
    if isinstance(value, Reward):
        reward = as_reward({**value.extra, "score": value.score, "acc": value.acc})
        return replace(reward, noise=as_number(value.noise, "noise"), notes=_plain(value.notes))
    if not isinstance(value, Mapping):
        return Reward(as_number(value))
    if "score" not in value:
        raise RewardError(f'the returned dict has the keys {sorted(map(str, value))}, expected "score" among them')
    acc = None if value.get("acc") is None else as_number(value["acc"], "acc")
    return Reward(as_number(value["score"]), acc, _metrics(value))


def to_json(graded: Graded) -> dict[str, Any]:
    """Plain data for JSON, never a pickle: a worker must not be able to run code in the trainer's process."""
    if isinstance(graded, str):
        return {"failure": graded}
    more = {"noise": graded.noise} if graded.noise else {}
    more |= {"notes": dict(graded.notes)} if graded.notes else {}
    return {"score": graded.score, "acc": graded.acc, "extra": dict(graded.extra), **more}


def from_json(item: Any) -> Graded:
    """The reverse of `to_json`, checked as strictly as the result of a reward function."""
    if isinstance(item, dict) and isinstance(item.get("failure"), str):
        return item["failure"]
    has_score = isinstance(item, dict) and "score" in item
    if not has_score or not all(isinstance(item.get(name, {}), dict) for name in ("extra", "notes")):
        return f"a reward worker answered {_show(item)}, expected a score"
    extra, notes = item.get("extra", {}), item.get("notes", {})
    try:
        return as_reward(Reward(item["score"], item.get("acc"), extra, noise=item.get("noise", 0.0), notes=notes))
    except RewardError as error:
        return f"a reward worker's answer was refused: {error}"


def _metrics(values: Mapping[str, Any]) -> dict[str, float]:
    return {
        str(key): as_number(value, f"the metric {key!r}")
        for key, value in values.items()
        if key not in ("score", "acc") and not isinstance(value, (str, bytes, type(None), list, tuple, Mapping))
    }


def _plain(notes: Mapping[str, Any]) -> dict[str, Any]:
    """Notes as plain data: texts, numbers, true and false; anything else as its text."""
    return {str(key): v if isinstance(v, (str, bool, int, float, type(None))) else str(v) for key, v in notes.items()}


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
