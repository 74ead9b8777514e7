"""Results of the sandbox: how a program ended, or why it could not be run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class SandboxError(RuntimeError):
    """The sandbox itself failed, which says nothing about the program. The reward is then missing, never 0."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """How one program ended. `exit_code` is None when a signal (`signal`) or the deadline ended it."""

    exit_code: int | None
    signal: int | None
    stdout: bytes
    stderr: bytes
    stdout_truncated: bool
    stderr_truncated: bool
    timed_out: bool
    wall: float

    @property
    def ok(self) -> bool:
        """Ended by itself with exit code 0 and with all its output kept. This alone earns no reward."""
        return self.exit_code == 0 and not self.timed_out and not self.stdout_truncated


@dataclass(frozen=True, slots=True)
class CallResult:
    """The result of calling the program: plain data in `value` when `ok`, else the reason in `error`."""

    ok: bool
    value: Any
    error: str
    timed_out: bool
