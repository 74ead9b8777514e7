"""How ranks learn of each other's end: a thread beside each, and a store that outlives any of them.

A rank that fails leaves its cause in the store. One that is killed leaves nothing: those on its machine see its process
gone, those elsewhere that it no longer beats. Whoever is left in a collective then has an error of its own, or hangs;
the thread names the cause, and ends a process that does not end by itself.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from gspo.distributed.rank_group import RankPlace
from gspo.exit_codes import EXIT_WORKERS_LOST
from gspo.processes import is_alive

BEAT_SECONDS = 1.0
SILENT_SECONDS = 40.0  # without a beat a rank on another machine counts as gone
GRACE_SECONDS = 15.0  # for the main thread to end by itself once the cause is known


class RankWatch:
    """Beats for this rank and watches the others. `cause` is None while all is well."""

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        # torchrun's store outlives the ranks: when it starts them again, what the last ones said is not meant.
        self._prefix = f"gspo/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        self._store = TCPStore(
            place.address, place.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30)
        )
        self._beats: dict[int, tuple[str, float]] = {}  # by rank: the last one, and when it was new
        self._pids: dict[int, int] = {}  # of ranks on this machine
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.cause: str | None = None
        self._store.set(self._key("where"), json.dumps([socket.gethostname(), os.getpid()]))
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def fail(self, message: str) -> None:
        """Leave the cause of this rank's end for the others."""
        with self._lock:
            try:
                self._store.set(self._key("failure"), message)
            except RuntimeError:  # the store is gone too: nobody is left to tell
                return

    def find_cause(self, seconds: float) -> str | None:
        """Why the others may be gone: waits for the thread to find out."""
        end = time.monotonic() + seconds
        while self.cause is None and time.monotonic() < end and not self._stopped.is_set():
            time.sleep(0.1)
        return self.cause

    def stop(self) -> None:
        """Say that this rank ends as it should, and watch no more."""
        with self._lock:
            if not self._stopped.is_set():
                self._stopped.set()
                try:
                    self._store.set(self._key("left"), "1")
                except RuntimeError:
                    return

    def _key(self, what: str, rank: int | None = None) -> str:
        return f"{self._prefix}/{what}/{self._place.rank if rank is None else rank}"

    def _watch(self) -> None:
        number = 0
        while not self._stopped.wait(BEAT_SECONDS):
            number += 1
            try:
                with self._lock:
                    self._store.set(self._key("beat"), str(number))
                    self.cause = self._look()
            except RuntimeError:  # torch's own error for a store whose server is gone
                self.cause = "the launcher (torchrun), which held the ranks together, is gone"
            if self.cause is not None:
                self._end_if_stuck()
                return

    def _look(self) -> str | None:
        """The cause that one of the other ranks gives, failures before disappearances."""
        others = [r for r in range(self._place.world_size) if r != self._place.rank]
        for rank in others:
            if self._store.check([self._key("failure", rank)]):
                return f"trainer rank {rank}: {self._get('failure', rank)}"
        for rank in others:
            if self._store.check([self._key("left", rank)]):
                continue
            if problem := self._gone(rank):
                return problem
        return None

    def _gone(self, rank: int) -> str | None:
        now = time.monotonic()
        if not self._store.check([self._key("where", rank)]):
            return None  # not here yet: joining has a time limit of its own
        if rank not in self._beats:
            host, pid = json.loads(self._get("where", rank))
            self._beats[rank] = ("", now)
            if host == socket.gethostname():
                self._pids[rank] = pid
        if rank in self._pids and not is_alive(self._pids[rank]):
            return f"trainer rank {rank} (process {self._pids[rank]}) is gone: it was killed or crashed"
        if self._store.check([self._key("beat", rank)]) and self._get("beat", rank) != self._beats[rank][0]:
            self._beats[rank] = (self._get("beat", rank), now)
        if rank not in self._pids and now - self._beats[rank][1] > SILENT_SECONDS:
            return f"trainer rank {rank} has given no sign of life for {SILENT_SECONDS:.0f} s: its machine is gone"
        return None

    def _get(self, what: str, rank: int) -> str:
        return self._store.get(self._key(what, rank)).decode()

    def _end_if_stuck(self) -> None:
        """End the process when its main thread, in a collective that never returns, does not."""
        if not self._stopped.wait(GRACE_SECONDS):
            print(f"error: {self.cause}; this rank does not end by itself and is stopped", file=sys.stderr)
            sys.stderr.flush()
            os._exit(EXIT_WORKERS_LOST)


def is_network_error(error: BaseException) -> bool:
    """Whether an error only says that another process could not be reached: a consequence, not a cause."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "nccl", "connection", "socket", "peer", "timed out")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def describe(error: BaseException) -> str:
    """An error in one line: what the other ranks and the user are format_stacks."""
    text: Any = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
