"""Rewards: functions and their composition, graders of math and code, the worker pool. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.rewards.builtin import reward as reward
    from gspo.rewards.compose import Overlong as Overlong
    from gspo.rewards.functions import RewardSpec as RewardSpec
    from gspo.rewards.graders.code import grade_code as grade_code
    from gspo.rewards.graders.math import grade_math as grade_math
    from gspo.rewards.protocol import RewardError as RewardError
    from gspo.rewards.protocol import Scorer as Scorer
    from gspo.rewards.scoring import dry_run as dry_run
    from gspo.rewards.scoring import make_scorer as make_scorer
    from gspo.rewards.signatures import Response as Response
    from gspo.types import Reward as Reward

_HOMES = {
    "Overlong": "gspo.rewards.compose",
    "Response": "gspo.rewards.signatures",
    "Reward": "gspo.types",
    "RewardError": "gspo.rewards.protocol",
    "RewardSpec": "gspo.rewards.functions",
    "Scorer": "gspo.rewards.protocol",
    "dry_run": "gspo.rewards.scoring",
    "grade_code": "gspo.rewards.graders.code",
    "grade_math": "gspo.rewards.graders.math",
    "make_scorer": "gspo.rewards.scoring",
    "reward": "gspo.rewards.builtin",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
