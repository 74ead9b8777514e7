"""Isolation levels: which this machine can give, shown by what a program could not do, once a process."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from .result import SandboxError

DEFAULT_LEVEL = 2

GUARANTEES = {
    3: "level 2, around it a file system that holds the interpreter and libraries alone (bubblewrap)",
    2: "reads the standard library, numpy and shared libraries, writes no file; about 110 system calls, none of "
    "which starts a process, opens a connection or touches another process; memory, threads and time limited",
    1: "names no file at all: modules that were not loaded beforehand cannot be imported; else as level 2",
    0: "no isolation: the program can do what you can do; only the verdict is kept apart",
}

HOW_TO = (
    "level 2 needs Linux 5.13 or newer with Landlock (`lsm=landlock,...` on the kernel's command line) and seccomp; "
    "level 1 needs seccomp alone; level 3 also the program `bwrap`. In a container, allow seccomp and the Landlock "
    "calls in its profile. To run model-written code without isolation, say so: --allow-unsandboxed-code"
)


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """One forbidden thing that a program tried: whether it was refused, and what it said."""

    name: str
    refused: bool
    detail: str


@dataclass(frozen=True, slots=True)
class LevelReport:
    """What the self-test of a level found. `reason` says why it is not granted."""

    level: int
    granted: bool
    reason: str
    canaries: tuple[CanaryReport, ...] = ()
    network_namespace: bool = False
    pid_namespace: bool = False


_reports: dict[tuple[int, int], LevelReport] = {}
_lock = threading.Lock()


def examine_level(level: int) -> LevelReport:
    """The self-test of a level, run once a process."""
    from .canaries import run_canaries

    key = (os.getpid(), level)
    with _lock:
        if key not in _reports:
            _reports[key] = run_canaries(level)
        return _reports[key]


def choose(level: int | None, allow_unsandboxed: bool) -> int:
    """The level to use; raises SandboxError with the reason and the remedy when it cannot be had."""
    if level == 0 or (level is None and allow_unsandboxed and not _best()):
        return _unsandboxed(allow_unsandboxed)
    if level is not None and level not in (1, 2, 3):
        raise SandboxError(f"sandbox level {level!r}: expected 0, 1, 2 or 3")
    if level is not None:
        report = examine_level(level)
        if not report.granted:
            raise SandboxError(f"sandbox level {level} is not available: {report.reason}. {HOW_TO}")
        return level
    best = _best()
    if not best:
        reasons = "; ".join(f"level {n}: {examine_level(n).reason}" for n in (2, 1))
        raise SandboxError(f"no sandbox level is available ({reasons}). {HOW_TO}")
    return best


def _best() -> int:
    return next((n for n in range(DEFAULT_LEVEL, 0, -1) if examine_level(n).granted), 0)


def _unsandboxed(allowed: bool) -> int:
    if not allowed:
        raise SandboxError(f"sandbox level 0 isolates nothing and was not allowed. {HOW_TO}")
    if os.environ.get("CI", "").lower() in ("true", "1"):
        raise SandboxError("model-written code is not run without isolation when CI=true. " + HOW_TO)
    return 0
