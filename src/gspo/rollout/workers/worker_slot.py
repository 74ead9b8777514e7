"""A seat in a fleet: one worker after another, as each dies, with back-off and an end to it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from gspo.rollout.engine import GroupRequest
from gspo.rollout.workers.connection import Connection, FleetClosed, Ticket, WorkerDied
from gspo.types import Group

Call = tuple[str, tuple[Any, ...]]  # a method's name and its arguments

BACKOFF = (0.0, 1.0, 4.0)
"""Seconds before a seat is filled again, by deaths since it last finished a group; after the last it is given up."""
START_SECONDS = 600.0  # for an engine to be built, beside what its first call may take
# The request or the numbers are wrong, not the worker: another one would say the same.
FATAL = (ValueError, KeyError, FloatingPointError)


class WorkerSlotLost(RuntimeError):
    """A seat whose workers keep dying. The message begins with the cause of the first death."""


class WorkerSlot:
    """One seat: its current worker, the groups that are in flight there, and what its workers died of.

    `journal` holds the calls that bring a new worker to the state of the current one. An engine gives the same tokens
    for the same calls, so replaying them loses nothing and changes nothing.
    """

    def __init__(
        self,
        index: int,
        connect: Callable[[int], Connection],
        timeout: float,
        notify: Callable[[str], None],
    ) -> None:
        self.index = index
        self._connect, self._timeout, self._notify = connect, timeout, notify
        self.assigned: dict[int, GroupRequest] = {}
        self.journal: list[Call] = []
        self.deaths: list[str] = []  # causes since it last finished a group
        self.num_restarts = 0
        self.restart_at: float | None = None  # set while the seat is empty
        self.closed = False
        self._sit()

    @property
    def name(self) -> str:
        return self.connection.name

    @property
    def num_responses(self) -> int:
        """Responses in flight: the seat's load."""
        return sum(request.n for request in self.assigned.values())

    def _sit(self) -> None:
        self.connection = self._connect(self.index)
        if self.closed:  # by another thread meanwhile, which may have ended only the worker before this one
            self.connection.kill("the run ended")
            self.connection.close()
            raise FleetClosed
        self.restart_at = None
        self._unread: list[Ticket[Any]] = []
        self._up_since: float | None = None
        self._hello = self.connection.send("ping")
        self._hello.add_done_callback(lambda _: self._note_up())

    def _note_up(self) -> None:
        self._up_since = time.monotonic()

    def call(self, method: str, *args: Any) -> None:
        """Send a call that changes the worker's state; `answer` waits for the last one."""
        self.journal.append((method, args))
        self._unread.append(self.connection.send(method, *args))

    def answer(self) -> Any:
        """The result of the last call. A worker that fails before it is replaced, and the calls are made again."""
        return self._insist(self._read)

    def ask(self, method: str, *args: Any, patience: float = 1.0, ticket: Ticket[Any] | None = None) -> Any:
        """The result of a call that leaves the worker's state as it is; made again when the worker dies over it.

        `ticket` is that of the call when it has been sent already.
        """
        first = [ticket or self.connection.send(method, *args)]
        return self._insist(
            lambda: self.wait(first.pop() if first else self.connection.send(method, *args), patience)
        )

    def _insist(self, attempt: Callable[[], Any]) -> Any:
        while True:
            try:
                return attempt()
            except FATAL:
                raise
            except Exception as error:
                self.bury(error)
                self.restart()

    def _read(self) -> Any:
        result = None
        for ticket in self._unread:
            result = self.wait(ticket)
        self._unread = []
        return result

    def wait(self, ticket: Ticket[Any], patience: float = 1.0) -> Any:
        """A ticket's result within `patience` deadlines, counted from when the engine is built."""
        if not self.is_up:
            self._hello.result(START_SECONDS)
        return ticket.result(self._timeout * patience)

    @property
    def is_up(self) -> bool:
        """Whether the current worker has built its engine, or failed to."""
        return self._hello.done()

    def hangs(self, since: float, patience: float = 1.0) -> bool:
        """Whether a worker that has owed an answer since then is past its deadline."""
        if self._up_since is None:
            return time.monotonic() - since > START_SECONDS
        return time.monotonic() - max(since, self._up_since) > self._timeout * patience

    def bury(self, error: BaseException) -> None:
        """Note why the current worker is no good, and end it; WorkerSlotLost when that has happened too often."""
        if self.closed:
            raise FleetClosed from error
        cause = self._obituary(error)
        self.connection.kill("it was given up")
        self.deaths.append(cause)
        if len(self.deaths) > len(BACKOFF):
            raise WorkerSlotLost(
                f"{self.deaths[0]}\n{len(BACKOFF)} workers started in its place ended too, without finishing a group; "
                f"the last: {cause}"
            )
        self.restart_at = time.monotonic() + BACKOFF[len(self.deaths) - 1]
        self._notify(
            f"{cause}\nit is replaced (attempt {len(self.deaths)} of {len(BACKOFF)}) and its {len(self.assigned)} "
            "groups are generated again"
        )

    def _obituary(self, error: BaseException) -> str:
        """What became of the current worker, in words."""
        if isinstance(error, TimeoutError) and not self.is_up:
            return f"{self.name}: its engine was not built within {START_SECONDS:g} s and it was ended"
        if isinstance(error, TimeoutError):
            return f"{self.name}: gave no answer within {self._timeout:g} s (rollout.worker_timeout) and was ended"
        return (
            str(error) if isinstance(error, WorkerDied) else f"{self.name}: {type(error).__name__}: {error}"
        )

    def restart(self) -> None:
        """Fill the seat again, when its back-off is over, and make the journal's calls."""
        assert self.restart_at is not None
        time.sleep(max(0.0, self.restart_at - time.monotonic()))
        if self.closed:
            raise FleetClosed
        self._sit()
        self.num_restarts += 1
        self._unread = [self.connection.send(method, *args) for method, args in self.journal]

    def begin_anew(self, journal: list[Call]) -> None:
        """Say that these calls alone bring a new worker to the current one's state."""
        assert not self._unread
        self.journal = journal

    def finished(self, groups: list[Group]) -> list[Group]:
        """Note groups that were handed out: the seat works. Those that are not in flight here are left out."""
        known = [group for group in groups if self.assigned.pop(group.submission, None) is not None]
        if known:
            self.deaths.clear()
        return known

    def take(self) -> list[GroupRequest]:
        """Everything that was in flight here; the seat holds nothing afterwards."""
        taken, self.assigned = list(self.assigned.values()), {}
        return taken

    def close(self) -> None:
        """End the worker for good."""
        self.closed = True
        self.assigned = {}
        if not self.is_up:  # it would listen only when its engine is built
            self.connection.kill("the run ended")
        self.connection.close()
