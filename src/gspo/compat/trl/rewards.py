"""Reward functions under TRL's names: `from gspo.compat.trl.rewards import accuracy_reward`."""

from __future__ import annotations

import re
from typing import Any

from gspo.rewards.graders.math import grade_math

_THINK = re.compile(r"\A<think>(?!.*<think>).*?</think>.*\Z", re.DOTALL)


def accuracy_reward(completions: list[Any], solution: list[str], **kwargs: Any) -> list[float]:
    """1 for a completion whose final answer equals the solution as mathematics, else 0."""
    return [grade_math(_text(c), truth).score for c, truth in zip(completions, solution, strict=True)]


def think_format_reward(completions: list[Any], **kwargs: Any) -> list[float]:
    """1 for a completion that begins with one <think>…</think> block, else 0."""
    return [float(bool(_THINK.match(_text(c)))) for c in completions]


def _text(completion: Any) -> str:
    """The text of a completion: itself, or the content of its only message."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
