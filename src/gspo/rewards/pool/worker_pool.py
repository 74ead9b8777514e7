"""A pool of workers with a deadline per job, a retry after a worker's death, and growth when workers hang.

    any thread                      the pool's thread                            workers
    submit(payload) ──▶ queue ────▶ waits for: a new job, an answer, ── job ──▶  run the handler,
                                    a closed socket, the next       ◀─ JSON ──  wait for the next job
    Future.result() ◀── result ──── deadline; whichever comes first
        waits                         └── start, stop, kill ──▶ WorkerSource

Nobody waits for a worker beyond its deadline: the pool's thread kills it then and fails its job. Stuck and added
workers run at a lower priority, so that spinning ones starve neither the trainer nor the fork server. `growth.py`
says when workers are added; when the queue is empty the pool shrinks back.
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
from dataclasses import dataclass
from typing import Any

from gspo.rewards.pool.frames import pack
from gspo.rewards.pool.growth import WorkerLimit
from gspo.rewards.pool.workers import Job, Worker, WorkerSource
from gspo.rewards.protocol import RewardError

START_TIMEOUT = 120.0
MAX_WORKERS = 64
_REAP_AFTER = 2.0
# How long before its deadline a stuck worker is asked for its stack, as a share of the deadline (at most of 1 s).
_STACK_LEAD = 0.1


class JobFailed(RewardError):
    """A job without a result: it passed its deadline, its worker died, or its handler raised."""


@dataclass(slots=True)
class PoolCounts:
    """Totals over a pool's life."""

    done: int = 0
    timeouts: int = 0
    started: int = 0
    latest_kill: float = 0.0  # the most seconds between a deadline and the kill of its worker


class WorkerPool:
    """Runs jobs on workers. `submit` may be called from any thread; `close` leaves nothing running."""

    def __init__(
        self,
        source: WorkerSource,
        *,
        num_workers: int,
        timeout: float,
        retries: int = 1,
        max_workers: int = MAX_WORKERS,
    ) -> None:
        assert num_workers >= 1 and timeout > 0
        self.counts = PoolCounts()
        self.limit = WorkerLimit(num_workers, max_workers, timeout)
        self.source = source
        self._timeout, self._retries = timeout, retries
        self._workers: set[Worker] = set()
        self._dying: set[Worker] = set()
        self._queue: deque[Job] = deque()
        self._failed_starts = 0
        self._lock = threading.Lock()  # between a job's submission and the end of the pool
        self._closing = False
        self._closed_because = f"the {source.what} pool was closed"
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_out.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_out, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=f"gspo-{source.what}-pool", daemon=True)
        self._thread.start()

    def submit(self, payload: Any) -> Future[Any]:
        """Queue a job. Its future returns the handler's result or raises JobFailed."""
        return self.enqueue(Job(pack(pickle.dumps(payload)), Future()))

    def enqueue(self, job: Job) -> Future[Any]:
        """Queue a job that is packed already."""
        with self._lock:
            if self._closing:
                raise RewardError(self._closed_because)
            self._queue.append(job)
        self._wake()
        return job.future

    def close(self) -> None:
        """Fail unfinished jobs and end all workers; returns when they are gone. May be called twice."""
        with self._lock:
            first, self._closing = not self._closing, True
        if first:
            self._wake()
        self._thread.join()

    def _wake(self) -> None:
        with contextlib.suppress(OSError):  # the pool's thread may have ended meanwhile
            self._wake_in.send(b"x")

    def _run(self) -> None:
        try:
            while not self._closing:
                self._assign()
                for key, events in self._selector.select(self._wait_time()):
                    self._on_event(key, events)
                self._expire()
                self._resize()
        except Exception as error:  # unfinished jobs fail with this reason
            self._closed_because = f"the {self.source.what} pool stopped: {type(error).__name__}: {error}"
        finally:
            self._shut_down()

    def _shut_down(self) -> None:
        with self._lock:
            self._closing = True
            unfinished = [*self._queue, *(w.job for w in self._workers if w.job)]
        for job in unfinished:
            _fail(job, self._closed_because)
        for worker in [*self._workers, *self._dying]:
            self._drop(worker)
        self.source.close()
        self._selector.close()
        self._wake_out.close()

    def _assign(self) -> None:
        """Give queued jobs to idle workers, and start workers for the rest within the limit."""
        self._hand_out()
        starting = sum(not worker.ready for worker in self._workers)
        missing = min(len(self._queue) - starting, self.limit.now - len(self._workers))
        if missing > 0:
            for worker in self.source.start(missing):
                self.counts.started += 1
                self._workers.add(worker)
                self._selector.register(worker.channel.sock, selectors.EVENT_READ, worker)
                if self.limit.now > self.limit.size:
                    self._lower_priority(worker)
            self._hand_out()

    def _hand_out(self) -> None:
        idle = [worker for worker in self._workers if worker.ready and worker.job is None]
        while self._queue and idle:
            if self._give(idle[-1], self._queue.popleft()):
                idle.pop()

    def _give(self, worker: Worker, job: Job) -> bool:
        """Send a job to an idle worker; False when it was cancelled."""
        if not job.future.running() and not job.future.set_running_or_notify_cancel():
            return False
        worker.job, worker.since, worker.stack_requested = job, time.monotonic(), False
        worker.channel.outgoing = job.data
        self._write(worker)
        return True

    def _wait_time(self) -> float | None:
        """Seconds until a deadline or a growth step is due; None when nothing runs."""
        now, busy = time.monotonic(), [w for w in self._workers if w.job or not w.ready]
        if not busy and not self._dying:
            return None
        due = min([*map(self._due, busy), *(worker.since + _REAP_AFTER for worker in self._dying)])
        if busy and self._queue and self.limit.now < self.limit.most and all(w.job for w in self._workers):
            due = min(due, self.limit.next_growth(w.since for w in busy))
        return max(0.0, due - now)

    def _due(self, worker: Worker) -> float:
        """When a busy worker needs attention: its start took too long, its stack is due, its deadline passes."""
        if not worker.ready:
            return worker.since + START_TIMEOUT
        lead = 0.0 if worker.stack_requested else _STACK_LEAD * min(1.0, self._timeout)
        return worker.since + self._timeout - lead

    def _on_event(self, key: selectors.SelectorKey, events: int) -> None:
        worker: Worker | None = key.data
        if worker is None:
            with contextlib.suppress(BlockingIOError):
                self._wake_out.recv(4096)
            return
        if worker in self._dying:
            self._drop(worker)
        if events & selectors.EVENT_WRITE and worker in self._workers:
            self._write(worker)
        if events & selectors.EVENT_READ and worker in self._workers:
            self._read(worker)

    def _write(self, worker: Worker) -> None:
        try:
            worker.channel.write()
        except OSError:
            self._on_death(worker)
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if worker.channel.outgoing else 0)
        self._selector.modify(worker.channel.sock, events, worker)

    def _read(self, worker: Worker) -> None:
        try:
            data = worker.channel.read()
        except (OSError, EOFError, ValueError):
            self._on_death(worker)
            return
        if data is not None:
            self._on_answer(worker, data)

    def _on_answer(self, worker: Worker, data: bytes) -> None:
        if not worker.ready:
            worker.ready, self._failed_starts = True, 0
            return
        job, worker.job = worker.job, None
        self.limit.note_done()
        # A priority cannot be raised again, and a worker that answers more than it was asked is broken.
        if worker.low_priority or job is None or worker.channel.has_more:
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

    def _on_death(self, worker: Worker) -> None:
        how, job = self._drop(worker), worker.job
        if job is None:
            self._failed_starts += not worker.ready
            if self._failed_starts >= 3:
                reason = f"three {self.source.what} workers in a row did not start; the last one: {how}"
                self._failed_starts = 0
                while self._queue:
                    _fail(self._queue.popleft(), reason)
            return
        job.num_deaths += 1
        if job.num_deaths <= self._retries:
            self._queue.appendleft(job)
        else:
            _fail(job, f"the worker died on it {job.num_deaths} times; the last time {how}")

    def _expire(self) -> None:
        """Request the stacks of workers close to their deadline; kill those past it and fail their jobs."""
        now = time.monotonic()
        for worker in [w for w in self._dying if now >= w.since + _REAP_AFTER]:
            self._drop(worker)
        late = []
        for worker in [w for w in self._workers if (w.job or not w.ready) and now >= self._due(w)]:
            if worker.ready and not worker.stack_requested:
                worker.stack_requested = True
                self.source.request_stack(worker)
            else:
                late.append(worker)
        stacks = [self.source.stack(worker) for worker in late]
        for worker in late:  # all before any is reaped, so that none waits for another
            self.source.kill(worker)
        for worker, stack in zip(late, stacks):
            if worker.job is None:
                self._on_death(worker)
            else:
                self._time_out(worker, worker.job, stack)

    def _time_out(self, worker: Worker, job: Job, stack: str) -> None:
        now = time.monotonic()
        self.counts.timeouts += 1
        self.counts.latest_kill = max(self.counts.latest_kill, now - worker.since - self._timeout)
        at = f". It was at\n{stack}" if stack else ""
        _fail(job, f"no result within {self._timeout:g} s; its worker was stopped{at}")
        self._workers.discard(worker)
        worker.since = now
        self._dying.add(worker)  # reaped when its socket closes: a spinning process needs a while to end

    def _resize(self) -> None:
        """Raise the limit while jobs wait behind stuck workers; without queued jobs, return to the pool's size."""
        if not self._queue:
            self.limit.shrink()
            for worker in [w for w in self._workers if w.ready and w.job is None and w.low_priority]:
                self._drop(worker)
            return
        full = len(self._workers) >= self.limit.now and all(worker.job for worker in self._workers)
        if full and self.limit.grow_if_stuck(worker.since for worker in self._workers):
            for worker in self._workers:
                self._lower_priority(worker)

    def _lower_priority(self, worker: Worker) -> None:
        worker.low_priority = True
        self.source.lower_priority(worker)

    def _drop(self, worker: Worker) -> str:
        """Forget a worker and end it. Returns how it ended."""
        self._workers.discard(worker)
        self._dying.discard(worker)
        self._selector.unregister(worker.channel.sock)
        return self.source.stop(worker)


def _fail(job: Job, reason: str) -> None:
    if not job.future.done():
        job.future.set_exception(JobFailed(reason))
