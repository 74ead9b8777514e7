"""The control: a coin decides the reward, so that nothing can be learned from it. `acc` still says what is right."""

from __future__ import annotations

import random
from typing import Any

from gspo.data.tasks.arithmetic import score
from gspo.rewards.graders.math import grade_math


def random_reward(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """Score 0 or 1 by chance. Random state is set from the row and the response before each call: a resume repeats it."""
    return {"score": float(random.random() < 0.5), "acc": grade_math(solution_str, ground_truth).acc}


def random_arithmetic(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, Any]:
    """The same for `arithmetic`."""
    return {"score": float(random.random() < 0.5), "acc": score(solution_str, ground_truth)}
