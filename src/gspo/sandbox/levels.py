"""Isolation levels: which of them this machine grants, found by programs that try what must be refused."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass

from .result import SandboxError

DEFAULT_LEVEL = 2

GUARANTEES = {
    3: "as level 2, in a file system that holds the interpreter and libraries only (bubblewrap)",
    2: "the program reads the standard library, numpy and shared libraries, and writes no file; of about 110 allowed "
    "system calls none starts a process, opens a connection or touches another process; memory, threads and time are "
    "limited",
    1: "as level 2, but the program opens no file at all: it can only import modules that were loaded beforehand",
    0: "no isolation: the program can do everything that you can do; only the verdict is reached in another process",
}

HOW_TO = (
    "level 2 needs Linux 5.13 or newer with Landlock (`lsm=landlock,...` on the kernel's command line) and seccomp; "
    "level 1 needs seccomp alone; level 3 also the program `bwrap`. In a container, allow seccomp and the Landlock "
    "calls in its profile. To run model-written code without isolation, use --allow-unsandboxed-code"
)


@dataclass(frozen=True, slots=True)
class CanaryReport:
    """One forbidden action that a program tried: whether it was refused, and what the program printed."""

    name: str
    refused: bool
    detail: str


@dataclass(frozen=True, slots=True)
class LevelReport:
    """The result of a level's self-test. `reason` says why the level is not granted."""

    level: int
    granted: bool
    reason: str
    canaries: tuple[CanaryReport, ...] = ()


_reports: dict[tuple[int, int], LevelReport] = {}
_lock = threading.Lock()


def examine_level(level: int) -> LevelReport:
    """The result of a level's self-test, which runs once per process."""
    from .canaries import run_canaries

    key = (os.getpid(), level)
    with _lock:
        if key not in _reports:
            _reports[key] = run_canaries(level)
        return _reports[key]


def choose(level: int | None, allow_unsandboxed: bool) -> int:
    """The level to use; raises SandboxError with the reason and the remedy when it is not available."""
    if level is None:
        if best := next((n for n in range(DEFAULT_LEVEL, 0, -1) if examine_level(n).granted), 0):
            return best
        if not allow_unsandboxed:
            reasons = "; ".join(f"level {n}: {examine_level(n).reason}" for n in (2, 1))
            raise SandboxError(f"no sandbox level is available ({reasons}). {HOW_TO}")
        level = 0
    if level not in (0, 1, 2, 3):
        raise SandboxError(f"sandbox level {level!r}: expected 0, 1, 2 or 3")
    if level == 0 and not allow_unsandboxed:
        raise SandboxError(f"sandbox level 0 isolates nothing and is not allowed. {HOW_TO}")
    if level == 0 and os.environ.get("CI", "").lower() in ("true", "1"):
        raise SandboxError("model-written code is not run without isolation when CI=true. " + HOW_TO)
    if level and not (report := examine_level(level)).granted:
        raise SandboxError(f"sandbox level {level} is not available: {report.reason}. {HOW_TO}")
    return level
