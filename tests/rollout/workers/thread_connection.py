"""Connections to workers in threads of this process, and engines that misbehave: the faults of a fleet without its start-up."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import InvalidStateError
from typing import Any

from gspo.rollout.engine import RolloutEngine
from gspo.rollout.workers.connection import Ticket, WorkerDied
from gspo.rollout.workers.worker import RolloutWorker


class ThreadConnection:
    """A Connection to a RolloutWorker over an engine that `make` builds, in a thread."""

    def __init__(self, make: Callable[[], RolloutEngine], index: int) -> None:
        self.name = f"rollout worker {index}"
        self.log: list[str] = []  # methods carried out
        self._make = make
        self._death: str | None = None
        self._lock = threading.Lock()
        self._waiting: list[Ticket[Any]] = []
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._death is None

    def send(self, method: str, *args: Any) -> Ticket[Any]:
        ticket: Ticket[Any] = Ticket()
        with self._lock:
            if self._death is None:
                self._waiting.append(ticket)
                self._inbox.put((method, args, ticket))
                return ticket
        ticket.set_exception(WorkerDied(self._death))
        return ticket

    def stacks(self) -> str:
        return "in a thread"

    def kill(self, reason: str = "it was killed") -> None:
        with self._lock:
            self._death = self._death or f"{self.name}: {reason}"
            waiting, self._waiting = self._waiting, []
        self._inbox.put(None)
        for ticket in waiting:
            with contextlib.suppress(InvalidStateError):
                ticket.set_exception(WorkerDied(self._death))

    def close(self) -> None:
        self.kill("it was closed")

    def _run(self) -> None:
        worker = RolloutWorker.__new__(RolloutWorker)
        try:
            worker.engine = self._make()
        except Exception as error:
            self.kill(f"{type(error).__name__}: {error}")
        while (call := self._inbox.get()) is not None and self._death is None:
            method, args, ticket = call
            try:
                result, error = getattr(worker, method)(*args), None
            except SystemExit as end:  # how an engine of a test dies
                self.kill(str(end))
                return
            except Exception as raised:
                result, error = None, raised
            self.log.append(method)
            with self._lock:
                if ticket not in self._waiting:
                    return
                self._waiting.remove(ticket)
            ticket.set_result(result) if error is None else ticket.set_exception(error)


class Version(dict[str, Any]):
    """No tensors, of a version."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version


class NoWeights:
    """A WeightStore for engines that have none; remembers what was published and discarded."""

    def __init__(self) -> None:
        self.published: list[int] = []
        self.held: set[int] = set()

    def publish(self, tensors: Any, version: int) -> Version:
        self.published.append(version)
        self.held.add(version)
        return Version(version)

    def discard(self, ref: Any) -> None:
        self.held.remove(ref.version)

    def close(self) -> None:
        self.held.clear()


def no_weights() -> contextlib.AbstractContextManager[dict[str, Any]]:
    return contextlib.nullcontext({})
