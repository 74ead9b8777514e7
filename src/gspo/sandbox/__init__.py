"""A sandbox for model-written Python.

The *judge* is the caller's process: it decides and keeps the secrets. A *fork server* is trusted too, but knows nothing
worth stealing. It forks a confined *child* per job: the *program* to be judged, or the *tester* that runs an
assert-style test and calls the program through the judge. Everything in `inside/` runs in the last three.
"""

from __future__ import annotations

from .benchmark import measure_speed
from .judge import DEFAULT_MEMORY, DEFAULT_WALL, Sandbox
from .levels import GUARANTEES, HOW_TO, examine_level
from .result import CallResult, RunResult, SandboxError

__all__ = [
    "DEFAULT_MEMORY",
    "DEFAULT_WALL",
    "GUARANTEES",
    "HOW_TO",
    "CallResult",
    "RunResult",
    "Sandbox",
    "SandboxError",
    "examine_level",
    "measure_speed",
]
