"""A thread that runs the requests of many clients in one engine.

    any thread: open, cancel ──▶ _inbox ──▶ the batcher's thread: submit, step, written ──▶ send(updates)

The engine belongs to the thread. The choices of a request share the prefill of their prompt.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Callable

from gspo.rollout.engine import GroupRequest, RolloutEngine
from gspo.serving.errors import ApiError
from gspo.serving.jobs import Job, JobCounts, Jobs, Send, name_of
from gspo.serving.parameters import Ask
from gspo.serving.prompts import Prompted
from gspo.serving.replies import Decode, Update
from gspo.types import Prompt

log = logging.getLogger(__name__)


class Batcher:
    """Runs jobs in an engine; `close` ends its thread and the engine. At most `max_open` responses wait or run."""

    def __init__(self, engine: RolloutEngine, decode: Decode, *, max_open: int = 1024) -> None:
        self._jobs, self._max_open = Jobs(engine, decode), max_open
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._num_open = self._num_jobs = 0
        self._closed = self._stopped = False
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    @property
    def counts(self) -> JobCounts:
        return self._jobs.counts

    @property
    def num_open(self) -> int:
        """Responses that wait or run."""
        return self._num_open

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def open(self, prompted: Prompted, ask: Ask, send: Send, name: str = "") -> Job:
        """Queue a request, from any thread; an ApiError when too many wait, or no more are answered."""
        with self._lock:
            if self._closed or not self.is_alive:
                raise ApiError(503, "the server is stopping, or its engine has ended", kind="server_error")
            if self._num_open + ask.n > self._max_open:
                raise ApiError(
                    429,
                    f"{self._num_open} responses wait or run and {ask.n} more would exceed the limit of {self._max_open}; "
                    "try again later",
                    kind="rate_limit_error",
                    code="queue_full",
                    retry_after=1,
                )
            self._num_open += ask.n
            self._num_jobs += 1
            job = Job(ask, _requests(self._num_jobs, prompted.token_ids, ask), self._counted(ask.n, send))
            self._inbox.put(lambda: self._jobs.begin(job))
        return job

    def cancel(self, job: Job) -> None:
        """Forget a job, from any thread; one that is over already is left as it is."""
        self._inbox.put(lambda: self._drop(job))

    def close(self) -> None:
        """End the thread; jobs in flight fail. May be called twice."""
        with self._lock:
            self._closed = True
            self._inbox.put(self._stop)
        self._thread.join()

    def _stop(self) -> None:
        self._stopped = True

    def _counted(self, num_open: int, send: Send) -> Send:
        """`send`, noting the choices that are over."""
        left = num_open

        def counted(found: list[Update] | ApiError) -> None:
            nonlocal left
            over = left if isinstance(found, ApiError) else sum(update.reason is not None for update in found)
            left -= over
            self._release(over)
            send(found)

        return counted

    def _drop(self, job: Job) -> None:
        num_open = len(job.open)
        self._jobs.drop(job)
        self._release(num_open)

    def _release(self, num: int) -> None:
        with self._lock:
            self._num_open -= num

    def _run(self) -> None:
        while not self._stopped:
            try:
                self._take_inbox()
                if len(self._jobs):
                    self._jobs.advance()
            except Exception as error:
                log.exception("generation failed")
                self._jobs.counts.failures += 1
                self._jobs.fail_all(ApiError(500, f"generation failed: {error}", kind="server_error"))
        self._jobs.fail_all(ApiError(503, "the server is stopping", kind="server_error"))
        self._jobs.engine.close()

    def _take_inbox(self) -> None:
        """Run what other threads asked for; waits for it while nothing is in flight."""
        if not len(self._jobs):
            self._inbox.get()()
        while True:
            try:
                action = self._inbox.get_nowait()
            except queue.Empty:
                return
            action()


def _requests(number: int, token_ids: tuple[int, ...], ask: Ask) -> list[GroupRequest]:
    """One request of the engine per choice. Its draws depend on the seed, not on the number of the request."""
    seed = secrets.randbits(63) if ask.seed is None else ask.seed
    watch = ask.stream or bool(ask.stop) or ask.call_end is not None or ask.params.num_top > 0
    return [
        GroupRequest(
            Prompt(name_of(f"request {number}", index), (), token_ids),
            *(number, 1, 0, ask.params, seed),
            first_response=index,
            watch=watch,
            draw=0,
            hold=True,
        )
        for index in range(ask.n)
    ]
