"""How many workers a pool may have: its own size, and more while all of them are stuck.

A job's deadline counts from the moment a worker starts it. With k workers, n hung jobs would then cost n/k deadlines,
so a stuck worker must not count as capacity. Whenever *every* worker has spent an eighth of the deadline on its job,
and no job was finished meanwhile, the limit becomes four times as large. From one worker it reaches 64 after three
eighths of a deadline, so 64 hung jobs are over after 1.4 deadlines plus the time to fork. Healthy jobs take far less
than an eighth of their deadline and never cause growth.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

_SHARE, _FACTOR = 1 / 8, 4


class WorkerLimit:
    """The number of workers that a pool may have now: from `size` up to `most`."""

    def __init__(self, size: int, most: int, timeout: float) -> None:
        self.size = self.now = size
        self.most = max(most, size)
        self._patience = timeout * _SHARE
        self._last_done = time.monotonic()

    def note_done(self) -> None:
        """A job was finished."""
        self._last_done = time.monotonic()

    def next_growth(self, starts: Iterable[float]) -> float:
        """When workers that started their jobs at `starts` count as stuck, if none of them finishes before."""
        return max(*starts, self._last_done) + self._patience

    def grow_if_stuck(self, starts: Iterable[float]) -> bool:
        """Raise the limit if all workers, busy since `starts`, are stuck. Returns whether they are."""
        stuck = time.monotonic() >= self.next_growth(starts)
        if stuck:
            self.now = min(_FACTOR * self.now, self.most)
        return stuck

    def shrink(self) -> None:
        """Return to the pool's own size."""
        self.now = self.size
