"""Detects trainer ranks that failed or disappeared: a watch thread in every rank, and a store that outlives any rank.

    rank 0                              store                             rank 1
    main thread ◄──────────────────── collectives ───────────────────► main thread
        ▲ cause, or end of the process                                     ▲ the same
    watch thread ── beat, failure ───► keys of ◄─── beat, failure ── watch thread
                 ◄── of the others ── all ranks ── of the others ──►

Every second a watch writes its beat and reads the keys of the other ranks. A rank that fails writes the cause. A killed
rank writes nothing: ranks on its machine see that its process is gone, ranks elsewhere that its beats stop. The main
threads of the remaining ranks are then in a collective that fails or hangs. The watch names the cause, and ends a
process whose main thread does not return.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from contextlib import suppress

import torch.distributed as dist

from gspo.distributed.rank_group import RankPlace
from gspo.distributed.rank_stacks import connect_store, store_key
from gspo.exit_codes import EXIT_WORKERS_LOST
from gspo.processes import is_alive

BEAT_SECONDS = 1.0
SILENT_SECONDS = 40.0  # a rank on another machine that sends no beat for this long counts as gone
GRACE_SECONDS = 15.0  # for the main thread to end by itself once the cause is known
CONNECT_SECONDS = 30.0


class RankWatch:
    """Sends this rank's beats and watches those of the others. `cause` says why a rank is gone; None while all are well."""

    def __init__(self, place: RankPlace) -> None:
        self._place = place
        self._store = connect_store(place.address, place.port, CONNECT_SECONDS)
        self._beats: dict[int, tuple[str, float]] = {}  # by rank: the last one and when it was first read
        self._pids: dict[int, int] = {}  # of ranks on this machine
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self.cause: str | None = None
        self._store.set(self._key("where"), json.dumps([socket.gethostname(), os.getpid()]))
        self._thread = threading.Thread(target=self._watch, name="rank-watch", daemon=True)
        self._thread.start()

    def fail(self, message: str) -> None:
        """Write the cause of this rank's end for the others."""
        with self._lock, suppress(RuntimeError):  # a store that is gone has no readers
            self._store.set(self._key("failure"), message)

    def find_cause(self, seconds: float) -> str | None:
        """Wait up to `seconds` for the thread to find out why other ranks are gone."""
        end = time.monotonic() + seconds
        while self.cause is None and time.monotonic() < end and not self._stopped.is_set():
            time.sleep(0.1)
        return self.cause

    def stop(self) -> None:
        """Tell the others that this rank ends as planned, and end the thread."""
        with self._lock, suppress(RuntimeError):
            if not self._stopped.is_set():
                self._stopped.set()
                self._store.set(self._key("left"), "1")

    def _key(self, what: str, rank: int | None = None) -> str:
        return store_key(what, self._place.rank if rank is None else rank)

    def _watch(self) -> None:
        number = 0
        while not self._stopped.wait(BEAT_SECONDS):
            number += 1
            try:
                with self._lock:
                    self._store.set(self._key("beat"), str(number))
                    self.cause = self._find_problem()
            except RuntimeError:  # torch's error for a store whose server is gone
                self.cause = "the launcher (torchrun), which held the ranks together, is gone"
            if self.cause is not None:
                self._end_if_stuck()
                return

    def _find_problem(self) -> str | None:
        """A problem of another rank: a failure that one reported, else one that disappeared."""
        others = [r for r in range(self._place.world_size) if r != self._place.rank]
        for rank in others:
            if self._store.check([self._key("failure", rank)]):
                return f"trainer rank {rank}: {self._get('failure', rank)}"
        for rank in others:
            if self._store.check([self._key("left", rank)]):
                continue
            if problem := self._disappeared(rank):
                return problem
        return None

    def _disappeared(self, rank: int) -> str | None:
        now = time.monotonic()
        if not self._store.check([self._key("where", rank)]):
            return None  # it has not joined yet, which has its own time limit
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
        """End the process if its main thread does not leave a hanging collective in time."""
        if not self._stopped.wait(GRACE_SECONDS):
            print(f"error: {self.cause}; this rank does not end by itself and is stopped", file=sys.stderr)
            sys.stderr.flush()
            os._exit(EXIT_WORKERS_LOST)


def is_network_error(error: BaseException) -> bool:
    """Whether an error only says that another process could not be reached: a consequence, not a cause."""
    if isinstance(error, dist.DistError):
        return True
    words = ("gloo", "nccl", "connection", "socket", "peer", "timed out")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def describe(error: BaseException) -> str:
    """An error in one line, for the other ranks and the user."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
