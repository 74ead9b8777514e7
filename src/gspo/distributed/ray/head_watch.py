"""Watches the head of a Ray cluster (its GCS): without it every call of Ray waits, and Ray ends the driver without a word.

main thread: calls of Ray, which wait           watch thread: connects to the head now and then
             ◄── the process ends with exit code 8 and the cause ── no answer for LOST_SECONDS
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time

from gspo.exit_codes import EXIT_WORKERS_LOST
from gspo.processes import children_of

EVERY_SECONDS = 2.0
LOST_SECONDS = 15.0  # a head that is started again in between is no loss


class HeadWatch:
    """From construction to `close`, ends this process when nothing answers at the head's address any more.

    The process cannot end in the usual order: freeing models and leaving the cluster would be calls of Ray. The last
    checkpoint is on disk, and the lock on the run folder ends with the process.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address, self._place = address, (host.strip("[]"), int(port))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gspo-ray-head", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        since = time.monotonic()
        while not self._closed.wait(EVERY_SECONDS):
            if self._answers():
                since = time.monotonic()
            elif time.monotonic() - since >= LOST_SECONDS and not self._closed.is_set():
                self._end(time.monotonic() - since)

    def _answers(self) -> bool:
        try:
            socket.create_connection(self._place, timeout=EVERY_SECONDS).close()
        except OSError:
            return False
        return True

    def _end(self, seconds: float) -> None:
        try:
            text = (
                f"error: the head of the Ray cluster (GCS at {self._address}) has died: no answer for {seconds:.0f} s. The "
                "last checkpoint is intact; the same command continues from it\n"
            )
            os.write(sys.stderr.fileno(), text.encode())
            kill_descendants(os.getpid())
        finally:  # whatever went wrong before
            os._exit(EXIT_WORKERS_LOST)

    def close(self) -> None:
        self._closed.set()


def kill_descendants(pid: int) -> None:
    """Kill the processes that a process has started, and those that they have: none is left to an outer parent."""
    for child in children_of(pid):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGSTOP)  # so that it starts no more
        kill_descendants(child)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(child, signal.SIGKILL)
