"""Ctrl-C, SIGTERM and SIGHUP: the first asks for a stop after the step in flight, the second stops at once.

torchrun passes a terminal's Ctrl-C on to processes that have had it already: signals within a moment are one.
A closed terminal sends SIGHUP more than once, from its shell and from the kernel: only the first one counts.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from types import FrameType

SAME_SECONDS = 2.0  # within this a repeated signal is the same request, where torchrun repeats them


class StopRequest:
    """A context in which SIGINT, SIGTERM and SIGHUP set `signal` instead of killing. Only the main thread can install it.

    A SIGHUP that is ignored, as under `nohup`, stays ignored. After one that was handled, later ones are.
    """

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0
        self._before: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells report it: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP; 0 without one."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if number != signal.SIGHUP or self.signal != signal.SIGHUP:
                signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)
            _leave_terminal()
        if self.signal is not None:
            if "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self._since < SAME_SECONDS:
                return
            raise KeyboardInterrupt
        self.signal, self._since = number, time.monotonic()


def _leave_terminal() -> None:
    """Replace the standard streams on a terminal that has hung up: every write to it would fail, and end the save."""
    for fd in (0, 1, 2):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(("/dev/pts/", "/dev/tty")):
                null = os.open(os.devnull, os.O_RDWR)
                os.dup2(null, fd)
                os.close(null)
