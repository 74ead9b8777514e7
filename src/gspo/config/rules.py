"""Cross-field rules."""

from __future__ import annotations

from gspo.config.problems import Problem
from gspo.config.schema import TrainerConfig
from gspo.config.settings import Settings


def check(config: TrainerConfig, settings: Settings) -> list[Problem]:
    """Every rule that the config breaks."""
    return []
