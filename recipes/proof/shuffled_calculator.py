"""The control of `gspo train calculator`: a calculator that answers another question, so that calls do not help."""

from __future__ import annotations

import functools
import random

from gspo.environments.builtin import calculator as right_answer
from gspo.environments.tools import ToolEnvironment


class ShuffledCalculator(ToolEnvironment):
    """Answers with the result of another sum of the same kind."""

    tool_format = "tag"

    def __init__(self) -> None:
        super().__init__([calculator])


@functools.wraps(right_answer)  # the tool looks the same
def calculator(expression: str) -> str:
    rng = random.Random(expression)
    return right_answer(f"{rng.randint(11, 99)}*{rng.randint(11, 99)}+{rng.randint(1, 99)}")
