"""Ctrl-C and SIGTERM: the first asks for a stop after the step in flight, the second stops at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class StopRequest:
    """A context in which SIGINT and SIGTERM set `signal` instead of killing. Only the main thread can install it."""

    def __init__(self) -> None:
        self.signal: int | None = None
        self._before: dict[int, object] = {}

    @property
    def exit_code(self) -> int:
        """128 + signal, as shells report it: 130 for Ctrl-C, 143 for SIGTERM; 0 when nothing asked."""
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
            raise KeyboardInterrupt
        self.signal = number
