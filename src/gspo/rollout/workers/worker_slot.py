"""A worker slot: one place in a fleet, whose worker is replaced when it fails, with back-off and a limit.

    Fleet ── call ──▶ WorkerSlot ── Connection.send ──▶ worker process
                        │  journal: every call since the last weights
          ◀─ answer ────┤  waits for all answers, each within `timeout`
                        │  failed or too late: kill, back off, start a new worker,
                        └─ send the journal again, wait again

`call` and `answer` are for a fleet that waits (LockstepFleet). AsyncFleet sends through the slot's connection itself
and uses the slot for `mark_failed` and `restart`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from gspo.rollout.engine import GroupRequest
from gspo.rollout.workers.connection import Args, Connection, FleetClosed, Result, WorkerDied
from gspo.rollout.workers.worker import RolloutWorker
from gspo.types import Group

Call = tuple[Any, tuple[Any, ...]]  # a method of RolloutWorker and its arguments

BACKOFF = (0.0, 1.0, 4.0)
"""Seconds before a new worker is started, by failures since the last finished group; after the last the slot is lost."""
START_SECONDS = 600.0  # for an engine to be built, in addition to the timeout of its first call
# The request or the numbers are wrong, not the worker: another one would fail in the same way.
FATAL = (ValueError, KeyError, FloatingPointError)


class WorkerSlotLost(RuntimeError):
    """A slot whose workers keep failing. The message begins with the cause of the first failure."""


class WorkerSlot:
    """One slot: its current worker, the groups in flight there, and why earlier workers failed.

    `journal` holds the calls that bring a new worker to the state of the current one. An engine gives the same tokens
    for the same calls, so replaying them loses nothing and changes nothing.
    """

    def __init__(
        self, index: int, connect: Callable[[int], Connection], timeout: float, notify: Callable[[str], None]
    ) -> None:
        self.index = index
        self._connect, self._timeout, self._notify = connect, timeout, notify
        self.assigned: dict[int, GroupRequest] = {}  # by submission
        self.journal: list[Call] = []
        self.failures: list[str] = []  # causes since the slot last finished a group
        self.num_restarts = 0
        self.restart_at: float | None = None  # set while the slot has no worker
        self.closed = False
        self._start_worker()

    @property
    def name(self) -> str:
        return self.connection.name

    @property
    def num_responses(self) -> int:
        """Responses in flight: the slot's load."""
        return sum(request.n for request in self.assigned.values())

    def _start_worker(self) -> None:
        self.connection = self._connect(self.index)
        if self.closed:  # by another thread meanwhile, which may have ended only the worker before this one
            self.connection.kill("the run ended")
            self.connection.close()
            raise FleetClosed
        self.restart_at = None
        self._unanswered: list[Future[Any]] = []
        self._ready_since: float | None = None
        self._ready = self.connection.send(RolloutWorker.ping)
        self._ready.add_done_callback(lambda _: self._note_ready())

    def _note_ready(self) -> None:
        self._ready_since = time.monotonic()

    def call(self, method: Callable[[RolloutWorker, *Args], Any], *args: *Args) -> None:
        """Send a call that changes the worker's state; `answer` waits for the last one."""
        self.journal.append((method, args))
        self._unanswered.append(self.connection.send(method, *args))

    def answer(self) -> Any:
        """The result of the last call. A worker that fails before that is replaced and the calls are made again."""
        return self._retry(self._wait_for_all)

    def ask(
        self, method: Callable[[RolloutWorker, *Args], Result], *args: *Args, num_timeouts: float = 1.0
    ) -> Callable[[], Result]:
        """Send a call that changes no state; returns a function that waits for its result, replacing failed workers."""
        sent = [self.connection.send(method, *args)]
        return lambda: self._retry(
            lambda: self._wait(sent.pop() if sent else self.connection.send(method, *args), num_timeouts)
        )

    def _retry(self, attempt: Callable[[], Any]) -> Any:
        """What `attempt` returns; a new worker is started whenever it raises what another worker might not."""
        while True:
            try:
                return attempt()
            except FATAL:
                raise
            except Exception as error:
                self.mark_failed(error)
                self.restart()

    def _wait_for_all(self) -> Any:
        results = [self._wait(answer) for answer in self._unanswered]
        self._unanswered = []
        return results[-1] if results else None

    def _wait(self, answer: Future[Any], num_timeouts: float = 1.0) -> Any:
        """The answer, within `num_timeouts` timeouts after the engine is built."""
        if not self.is_ready:
            self._ready.result(START_SECONDS)
        return answer.result(self._timeout * num_timeouts)

    @property
    def is_ready(self) -> bool:
        """Whether the current worker has built its engine, or failed to."""
        return self._ready.done()

    def is_overdue(self, since: float, num_timeouts: float = 1.0) -> bool:
        """Whether an answer that the worker has owed since then is past its deadline."""
        if self._ready_since is None:
            return time.monotonic() - since > START_SECONDS
        return time.monotonic() - max(since, self._ready_since) > self._timeout * num_timeouts

    def mark_failed(self, error: BaseException) -> None:
        """Kill the current worker and schedule a new one; WorkerSlotLost when that has happened too often."""
        if self.closed:
            raise FleetClosed from error
        cause = self._describe_failure(error)
        self.connection.kill("it was given up")
        self.failures.append(cause)
        if len(self.failures) > len(BACKOFF):
            raise WorkerSlotLost(
                f"{self.failures[0]}\n{len(BACKOFF)} workers started in its place ended too, without finishing a group; "
                f"the last: {cause}"
            )
        self.restart_at = time.monotonic() + BACKOFF[len(self.failures) - 1]
        self._notify(
            f"{cause}\nit is replaced (attempt {len(self.failures)} of {len(BACKOFF)}) and its {len(self.assigned)} "
            "groups are generated again"
        )

    def _describe_failure(self, error: BaseException) -> str:
        if isinstance(error, TimeoutError) and not self.is_ready:
            return f"{self.name}: its engine was not built within {START_SECONDS:g} s and it was ended"
        if isinstance(error, TimeoutError):
            return f"{self.name}: gave no answer within {self._timeout:g} s (rollout.worker_timeout) and was ended"
        return str(error) if isinstance(error, WorkerDied) else f"{self.name}: {type(error).__name__}: {error}"

    def restart(self) -> None:
        """Start a new worker when the back-off is over, and send it the calls of the journal."""
        assert self.restart_at is not None
        time.sleep(max(0.0, self.restart_at - time.monotonic()))
        if self.closed:
            raise FleetClosed
        self._start_worker()
        self.num_restarts += 1
        self._unanswered = [self.connection.send(method, *args) for method, args in self.journal]

    def reset_journal(self, *calls: Call) -> None:
        """From now on these calls alone bring a new worker to the state of the current one."""
        assert not self._unanswered
        self.journal = list(calls)

    def record_finished(self, groups: list[Group]) -> list[Group]:
        """Note that the worker finished these groups, which clears its failures; returns those in flight here."""
        known = [group for group in groups if self.assigned.pop(group.submission, None) is not None]
        if known:
            self.failures.clear()
        return known

    def take_assigned(self) -> list[GroupRequest]:
        """Remove and return everything in flight here."""
        taken, self.assigned = list(self.assigned.values()), {}
        return taken

    def close(self) -> None:
        """End the worker for good."""
        self.closed = True
        self.assigned = {}
        if not self.is_ready:  # it would notice `close` only after building its engine
            self.connection.kill("the run ended")
        self.connection.close()
