"""Requests of many clients in one engine: a thread that submits, steps, and sends every client what it gained.

    any thread: open, cancel ──▶ _inbox ──▶ the batcher's thread: submit, step, written ──▶ send(updates)

The engine belongs to the thread that calls `advance`. `send` gets all updates of a step at once. Every choice of a request
is a request of its own to the engine, so that one can end before the others; they share the prefill of their prompt.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gspo.rollout.engine import GroupRequest, RolloutEngine
from gspo.serving.errors import ApiError
from gspo.serving.parameters import Ask
from gspo.serving.replies import Decode, Reason, Reply, Update
from gspo.types import Prompt, Rollout

log = logging.getLogger(__name__)
Send = Callable[["list[Update] | ApiError"], None]
FINISHED: dict[str, Reason] = {"stop": "stop", "length": "length"}


@dataclass(eq=False, slots=True)
class Job:
    """A request in the engine. `send` gets its updates, in the batcher's thread."""

    number: int
    token_ids: tuple[int, ...]
    ask: Ask
    send: Send
    replies: dict[int, Reply] = field(default_factory=dict)  # those that are not over, by index


@dataclass(slots=True)
class BatchCounts:
    """Totals since the start."""

    prompt_tokens: int = 0
    generated_tokens: int = 0
    cancelled: int = 0
    failures: int = 0


class Batcher:
    """Runs jobs in an engine; `close` ends its thread and the engine. At most `max_open` responses wait or run."""

    def __init__(self, engine: RolloutEngine, decode: Decode, *, max_open: int = 1024) -> None:
        self._engine, self._decode, self._max_open = engine, decode, max_open
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}
        self._lock = threading.Lock()
        self._num_open = self._num_jobs = 0
        self._closed = False
        self.counts = BatchCounts()
        self._thread = threading.Thread(target=self._run, name="batcher", daemon=True)
        self._thread.start()

    @property
    def num_open(self) -> int:
        """Responses that wait or run."""
        return self._num_open

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def open(self, token_ids: Sequence[int], ask: Ask, send: Send) -> Job:
        """Queue a request, from any thread; an ApiError when too many wait."""
        with self._lock:
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
            job = Job(self._num_jobs, tuple(token_ids), ask, send)
        self._inbox.put(lambda: self._begin(job))
        return job

    def cancel(self, job: Job) -> None:
        """Forget a job, from any thread; one that is over already is left as it is."""
        self._inbox.put(lambda: self._drop(job))

    def close(self) -> None:
        """End the thread; jobs in flight fail. May be called twice."""
        self._closed = True
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._closed:
            try:
                self._take_inbox()
                if self._jobs:
                    self._advance()
            except Exception as error:
                log.exception("generation failed")
                self.counts.failures += 1
                self._fail_all(ApiError(500, f"generation failed: {error}", kind="server_error"))
        self._fail_all(ApiError(503, "the server is stopping", kind="server_error"))
        self._engine.close()

    def _take_inbox(self) -> None:
        """Run what other threads asked for; waits for it while nothing is in flight."""
        while True:
            try:
                action = self._inbox.get(block=not self._jobs)
            except queue.Empty:
                return
            if action is None:
                return
            action()

    def _begin(self, job: Job) -> None:
        ask = job.ask
        job.replies = {i: Reply(i, self._decode, ask.stop, ask.include_stop, ask.call_end) for i in range(ask.n)}
        self._jobs[job.number] = job
        self.counts.prompt_tokens += len(job.token_ids)
        seed = secrets.randbits(63) if ask.seed is None else ask.seed
        watch = ask.stream or bool(ask.stop or ask.call_end) or ask.params.num_top > 0
        try:
            for index in range(ask.n):
                prompt = Prompt(f"{job.number}#{index}", (), job.token_ids)
                self._engine.submit(
                    GroupRequest(prompt, job.number, 1, 0, ask.params, seed, first_response=index, watch=watch, draw=0)
                )
        except ValueError as error:
            self._drop(job)
            job.send(ApiError(400, str(error)))

    def _drop(self, job: Job) -> None:
        """Take what is left of a job out of the engine."""
        if self._jobs.pop(job.number, None) is None:
            return
        for index in job.replies:
            self._engine.cancel(job.number, index)
        self.counts.cancelled += len(job.replies)
        self._release(len(job.replies))

    def _advance(self) -> None:
        """One step of the engine; every job is sent what it gained."""
        groups = self._engine.step()
        updates: dict[Job, list[Update]] = {}
        for piece in self._engine.written():
            job = self._jobs.get(piece.submission)
            reply = job.replies.get(piece.response) if job is not None else None
            if job is not None and reply is not None:
                updates.setdefault(job, []).append(reply.feed(piece.token_ids, piece.log_probs, piece.top))
                if reply.is_over:
                    self._engine.cancel(piece.submission, piece.response)
                    self._end_reply(job, reply)
        for group in groups:
            job = self._jobs.get(group.submission)
            reply = job.replies.get(int(group.prompt.uid.rpartition("#")[2])) if job is not None else None
            if job is not None and reply is not None:
                updates.setdefault(job, []).append(_last_update(reply, group.rollouts[0]))
                self._end_reply(job, reply)
        for job, found in updates.items():
            job.send(found)

    def _end_reply(self, job: Job, reply: Reply) -> None:
        del job.replies[reply.index]
        self.counts.generated_tokens += reply.num_tokens
        if not job.replies:
            del self._jobs[job.number]
        self._release(1)

    def _release(self, num: int) -> None:
        with self._lock:
            self._num_open -= num

    def _fail_all(self, error: ApiError) -> None:
        """Every job in flight gets the error; the engine is empty afterwards."""
        jobs, self._jobs = list(self._jobs.values()), {}
        self._engine.clear()
        for job in jobs:
            self._release(len(job.replies))
            job.send(error)


def _last_update(reply: Reply, rollout: Rollout) -> Update:
    """The tokens of a finished response that were not reported while it ran."""
    first = reply.num_tokens
    return reply.feed(rollout.token_ids[first:], rollout.log_probs[first:], reason=FINISHED[rollout.finish_reason])
