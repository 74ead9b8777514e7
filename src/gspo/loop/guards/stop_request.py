"""Ctrl-C and SIGTERM: the first asks for a stop after the step in flight, the second stops at once.

torchrun passes a terminal's Ctrl-C on to processes that have had it already: signals within a moment are one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import FrameType

SAME_SECONDS = 2.0  # within this a repeated signal is the same request, where torchrun repeats them


class StopRequest:
    """A context in which SIGINT and SIGTERM set `signal` instead of killing. Only the main thread can install it."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._since = 0.0
        self._before: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells report it: 130 for Ctrl-C, 143 for SIGTERM; 0 without a signal."""
        return 0 if self.signal is None else 128 + self.signal

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # pyright: ignore[reportArgumentType]
        self._before.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            if "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self._since < SAME_SECONDS:
                return
            raise KeyboardInterrupt
        self.signal, self._since = number, time.monotonic()
