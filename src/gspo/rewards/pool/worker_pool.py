"""A pool of workers with a deadline for each job, retry after a worker's death, and growth when workers hang.

A job's deadline counts from the moment a worker takes it. With k workers, n hung jobs would then cost n/k deadlines,
so a worker that is stuck must not count as capacity: whenever *every* worker has been on its job for an eighth of
the deadline, and nothing was finished meanwhile, the pool becomes four times as large. From one worker that reaches
64 after three eighths of a deadline, so 64 hung jobs are over after 1.4 deadlines and the time it takes to fork.
Stuck and added workers run at a lower priority, so that spinning ones starve neither the trainer nor the fork server.
Healthy jobs take far less than an eighth of their deadline and never cause growth. When the queue is empty the pool
shrinks back.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import selectors
import socket
import threading
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from gspo.rewards.pool import frames as wire
from gspo.rewards.pool.workers import WorkerHandle, WorkerSource
from gspo.rewards.protocol import RewardError

START_TIMEOUT = 120.0
MAX_WORKERS = 64
_GROWTH_SHARE, _GROWTH = 1 / 8, 4
_REAP_AFTER = 2.0
_STACK_LEAD = (
    0.1  # share of the deadline (of 1 s at most) before its end at which a stuck worker's stack is taken
)


class JobFailed(RewardError):
    """A job without a result: it passed its deadline, its worker died, or its handler raised."""


@dataclass(slots=True)
class PoolCounts:
    """What happened in a pool's life."""

    done: int = 0
    timeouts: int = 0
    deaths: int = 0
    retries: int = 0
    started: int = 0
    latest_kill: float = 0.0  # seconds by which a deadline was passed at most when its worker was killed


@dataclass(slots=True, eq=False)
class _Job:
    data: bytes
    future: Future[Any]
    deaths: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    member: WorkerHandle
    since: float  # when it took its job, or was started
    ready: bool = False
    job: _Job | None = None
    marked: bool = False
    slowed: bool = False
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytes = b""


class WorkerPool:
    """Runs jobs on a crew's workers. `submit` may be called from any thread; `close` leaves nothing running."""

    def __init__(
        self,
        crew: WorkerSource,
        *,
        num_workers: int,
        timeout: float,
        retries: int = 1,
        max_workers: int = MAX_WORKERS,
    ) -> None:
        assert num_workers >= 1 and timeout > 0
        self.counts = PoolCounts()
        self._crew = crew
        self._size, self._limit, self._max = num_workers, num_workers, max(max_workers, num_workers)
        self._timeout, self._retries = timeout, retries
        self._workers: set[_Worker] = set()
        self._dying: set[_Worker] = set()
        self._queue: deque[_Job] = deque()
        self._last_done = time.monotonic()
        self._failed_starts = 0
        self._lock = threading.Lock()
        self._inbox: list[_Job] = []
        self._closing = False
        self._closed_because = "the reward pool was closed"
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name="gspo-reward-pool", daemon=True)
        self._thread.start()

    def submit(self, payload: Any) -> Future[Any]:
        """Queue a job; its future gives the handler's result, or raises JobFailed."""
        job = _Job(wire.frame(pickle.dumps(payload)), Future())
        with self._lock:
            if self._closing:
                raise RewardError(self._closed_because)
            self._inbox.append(job)
        self._wake_in.send(b"x")
        return job.future

    def close(self) -> None:
        """Fail what is unfinished, end all workers, return when they are gone. May be called twice."""
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            self._wake_in.send(b"x")
        self._thread.join()

    def _run(self) -> None:
        try:
            while not self._closing:
                self._take_inbox()
                self._assign()
                for key, events in self._selector.select(self._wait_time()):
                    self._on_event(key, events)
                self._expire()
                self._resize()
        except Exception as error:  # a pool that cannot go on must not leave anyone waiting
            self._closed_because = f"the reward pool stopped: {type(error).__name__}: {error}"
        finally:
            self._shut_down()

    def _shut_down(self) -> None:
        with self._lock:
            self._closing = True
            unfinished = [*self._inbox, *self._queue, *(w.job for w in self._workers if w.job)]
        for job in unfinished:
            _fail(job, self._closed_because)
        for worker in [*self._workers, *self._dying]:
            self._drop(worker)
        self._crew.close()
        self._selector.close()
        self._wake_out.close()

    def _take_inbox(self) -> None:
        with self._lock:
            jobs, self._inbox = self._inbox, []
        self._queue.extend(job for job in jobs if job.future.set_running_or_notify_cancel())

    def _hand_out(self) -> None:
        idle = [worker for worker in self._workers if worker.ready and worker.job is None]
        while self._queue and idle:
            worker = idle.pop()
            worker.job, worker.since, worker.marked = self._queue.popleft(), time.monotonic(), False
            worker.outgoing = worker.job.data
            self._send(worker)

    def _assign(self) -> None:
        self._hand_out()
        starting = sum(not worker.ready for worker in self._workers)
        missing = min(len(self._queue) - starting, self._limit - len(self._workers))
        if missing > 0:
            for member in self._crew.start(missing):
                member.sock.setblocking(False)
                self.counts.started += 1
                worker = _Worker(member, time.monotonic(), ready=member.ready)
                self._workers.add(worker)
                self._selector.register(member.sock, selectors.EVENT_READ, worker)
                if self._limit > self._size:
                    self._slow(worker)
            self._hand_out()

    def _wait_time(self) -> float | None:
        """Seconds until a deadline or a growth step is due; None when nothing runs."""
        now, busy = time.monotonic(), [w for w in self._workers if w.job or not w.ready]
        if not busy and not self._dying:
            return None
        due = min([*map(self._due, busy), *(worker.since + _REAP_AFTER for worker in self._dying)])
        if busy and self._queue and self._limit < self._max and all(w.job for w in self._workers):
            due = min(due, max(max(w.since for w in busy), self._last_done) + self._timeout * _GROWTH_SHARE)
        return max(0.0, due - now)

    def _due(self, worker: _Worker) -> float:
        if not worker.ready:
            return worker.since + START_TIMEOUT
        lead = 0.0 if worker.marked else _STACK_LEAD * min(1.0, self._timeout)
        return worker.since + self._timeout - lead

    def _on_event(self, key: selectors.SelectorKey, events: int) -> None:
        worker: _Worker | None = key.data
        if worker is None:
            with contextlib.suppress(BlockingIOError):
                self._wake_out.recv(4096)
            return
        if worker in self._dying:
            self._drop(worker)
        if worker not in self._workers:
            return
        if events & selectors.EVENT_WRITE:
            self._send(worker)
        if events & selectors.EVENT_READ and worker in self._workers:
            self._receive(worker)

    def _send(self, worker: _Worker) -> None:
        try:
            sent = worker.member.sock.send(worker.outgoing)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._on_death(worker)
            return
        worker.outgoing = worker.outgoing[sent:]
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.outgoing else 0)
        self._selector.modify(worker.member.sock, events, worker)

    def _receive(self, worker: _Worker) -> None:
        try:
            part = worker.member.sock.recv(1 << 20)
            worker.incoming += part
            data = wire.take_frame(worker.incoming) if part else None
        except BlockingIOError:
            return
        except (OSError, ValueError):
            part, data = b"", None
        if not part:
            self._on_death(worker)
        elif data is not None:
            self._on_answer(worker, data)

    def _on_answer(self, worker: _Worker, data: bytes) -> None:
        if not worker.ready:
            worker.ready, self._failed_starts = True, 0
            return
        job, worker.job = worker.job, None
        self._last_done = time.monotonic()
        if (
            worker.slowed or job is None
        ):  # a priority cannot be raised again; an answer without a job is a fault
            self._drop(worker)
        if job is None:
            return
        self.counts.done += 1
        try:
            answer = json.loads(data)
            result, error = answer.get("result"), answer.get("error")
        except (ValueError, AttributeError, RecursionError):
            result, error = None, "the worker's answer was not JSON"
        if error is not None:
            _fail(job, str(error))
        else:
            job.future.set_result(result)

    def _on_death(self, worker: _Worker) -> None:
        how = self._drop(worker)
        self.counts.deaths += 1
        job = worker.job
        if job is None:
            self._failed_starts += not worker.ready
            if self._failed_starts >= 3:
                self._failed_starts = 0
                while self._queue:
                    _fail(
                        self._queue.popleft(),
                        f"three reward workers in a row did not start; the last one: {how}",
                    )
            return
        job.deaths += 1
        if job.deaths <= self._retries:
            self.counts.retries += 1
            self._queue.appendleft(job)
        else:
            _fail(job, f"the worker died on it {job.deaths} times; the last time {how}")

    def _expire(self) -> None:
        now = time.monotonic()
        for worker in [w for w in self._dying if now >= w.since + _REAP_AFTER]:
            self._drop(worker)
        late = [w for w in self._workers if (w.job or not w.ready) and now >= self._due(w)]
        unmarked = [worker for worker in late if worker.ready and not worker.marked]
        for worker in unmarked:
            worker.marked = True
            self._crew.mark(worker.member)
        late = [worker for worker in late if worker not in unmarked]
        stacks = [self._crew.stack(worker.member) for worker in late]
        for worker in late:  # all at once, so that they end side by side and none waits for another
            self._crew.kill(worker.member)
        for worker, stack in zip(late, stacks):
            if worker.job is None:
                self._on_death(worker)
                continue
            self.counts.timeouts += 1
            self.counts.latest_kill = max(
                self.counts.latest_kill, time.monotonic() - worker.since - self._timeout
            )
            at = f". It was at\n{stack}" if stack else ""
            _fail(worker.job, f"no result within {self._timeout:g} s; its worker was stopped{at}")
            self._workers.discard(worker)
            worker.since = now
            self._dying.add(worker)  # reaped when its socket closes: a spinning process takes a while to end

    def _resize(self) -> None:
        if not self._queue:
            self._limit = self._size
            for worker in [w for w in self._workers if w.ready and w.job is None and w.slowed]:
                self._drop(worker)  # a priority cannot be raised again
            return
        stuck_since = time.monotonic() - self._timeout * _GROWTH_SHARE
        stuck = all(worker.job and worker.since <= stuck_since for worker in self._workers)
        if stuck and len(self._workers) >= self._limit and self._last_done <= stuck_since:
            self._limit = min(_GROWTH * self._limit, self._max)
            for worker in self._workers:
                self._slow(worker)

    def _slow(self, worker: _Worker) -> None:
        if not worker.slowed:
            worker.slowed = True
            self._crew.slow(worker.member)

    def _drop(self, worker: _Worker) -> str:
        self._workers.discard(worker)
        self._dying.discard(worker)
        self._selector.unregister(worker.member.sock)
        return self._crew.stop(worker.member)


def _fail(job: _Job, reason: str) -> None:
    if not job.future.done():
        job.future.set_exception(JobFailed(reason))
