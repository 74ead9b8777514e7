"""A sandbox for model-written Python: judge here, fork-server and confined child in other processes."""

from __future__ import annotations

from .benchmark import Speed, measure_speed
from .judge import DEFAULT_MEMORY, DEFAULT_WALL, Sandbox
from .levels import GUARANTEES, HOW_TO, CanaryReport, LevelReport, examine_level
from .result import CallResult, RunResult, SandboxError

__all__ = [
    "DEFAULT_MEMORY",
    "DEFAULT_WALL",
    "GUARANTEES",
    "HOW_TO",
    "CallResult",
    "CanaryReport",
    "LevelReport",
    "RunResult",
    "Sandbox",
    "SandboxError",
    "Speed",
    "examine_level",
    "measure_speed",
]
