"""One rollout worker as a Ray actor: a Connection whose tickets are futures of the actor's answers."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

import ray
from ray.exceptions import RayError

from gspo.distributed.rank_stacks import thread_stacks
from gspo.distributed.ray.actors import go_to, plain_class
from gspo.distributed.ray.errors import root_cause
from gspo.processes import portable_error
from gspo.rollout.workers.connection import Args, Result, WorkerDied
from gspo.rollout.workers.worker import EngineSpec, RolloutWorker

CLOSE_SECONDS = 5.0  # for a worker to end by itself


class RolloutHost:
    """The actor: builds the worker when it starts and carries out its calls, one at a time.

    An engine that cannot be built is format_stacks to every caller as its own error, instead of ending the actor.
    """

    def __init__(self, worker_class: type, spec: EngineSpec, folder: str) -> None:
        go_to(folder)
        self._error: Exception | None = None
        try:
            self._worker = worker_class(spec)
        except Exception as error:
            self._error = error

    def call(self, method: str, *args: Any) -> Any:
        try:
            if self._error is not None:
                raise self._error
            return getattr(self._worker, method)(*args)
        except Exception as error:
            raise portable_error(error) from None

    @ray.method(concurrency_group="watch")
    def live(self) -> None:
        """Never returns: its caller learns at once when this process ends."""
        threading.Event().wait()

    @ray.method(concurrency_group="watch")
    def stacks(self) -> str:
        """What every thread does now."""
        return thread_stacks()


class RayConnection:
    """A Connection to a new worker, started at once with the given actor options."""

    def __init__(
        self, spec: EngineSpec, options: dict[str, Any], worker_class: Any = RolloutWorker, name: str = "rollout worker"
    ) -> None:
        self.name = name
        self._lock = threading.Lock()
        self._open: set[Future] = set()
        self._ended: str | None = None
        host: Any = ray.remote(concurrency_groups={"watch": 2})(RolloutHost)  # pyright: ignore[reportCallIssue]
        self._actor: Any = host.options(**options, max_restarts=0).remote(plain_class(worker_class), spec, os.getcwd())
        self._life: Any = self._actor.live.remote()
        self._life.future().add_done_callback(self._end)

    @property
    def alive(self) -> bool:
        return self._ended is None

    def send(self, method: Callable[[RolloutWorker, *Args], Result], *args: *Args) -> Future[Result]:
        """Call the worker's method; a reference among `args` arrives as what it refers to."""
        ticket: Future[Result] = Future()
        with self._lock:
            if self._ended is not None:
                ticket.set_exception(WorkerDied(self._ended))
                return ticket
            self._open.add(ticket)
            answer = self._actor.call.remote(method.__name__, *args)
        answer.future().add_done_callback(lambda done: self._answer(ticket, done))
        return ticket

    def _answer(self, ticket: Future, done: Future) -> None:
        error = done.exception()
        if error is None:
            self._settle(ticket, result=done.result())
            return
        cause = root_cause(error, self.name)
        if isinstance(cause, WorkerDied):
            self._end(done)
        else:
            self._settle(ticket, error=cause)

    def _end(self, done: Future) -> None:
        """The worker is gone: every open ticket gets the reason."""
        error = done.exception()
        reason = str(root_cause(error, self.name)) if error is not None else f"{self.name} ended"
        self._fail_all(reason)

    def _fail_all(self, reason: str) -> None:
        with self._lock:
            if self._ended is None:
                self._ended = reason
            tickets, self._open = list(self._open), set()
        for ticket in tickets:
            self._settle(ticket, error=WorkerDied(self._ended))

    def _settle(self, ticket: Future, result: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            self._open.discard(ticket)
        try:
            if error is None:
                ticket.set_result(result)
            else:
                ticket.set_exception(error)
        except InvalidStateError:
            pass  # a killed worker's last answer came too late

    def stacks(self) -> str:
        """What the worker's threads do now; "" when it does not say so within a second."""
        try:
            return ray.get(self._actor.stacks.remote(), timeout=1.0)
        except RayError:
            return ""

    def kill(self, reason: str = "it was killed") -> None:
        """End the worker at once."""
        self._fail_all(f"{self.name}: {reason}")
        if ray.is_initialized():
            ray.kill(self._actor, no_restart=True)

    def close(self) -> None:
        """Let the worker close its engine, then end it and wait until it is gone. May be called twice."""
        if not ray.is_initialized():
            return
        if self.alive:
            ray.wait([self._actor.call.remote(RolloutWorker.close.__name__)], timeout=CLOSE_SECONDS)
        self.kill("it was closed")
        ray.wait([self._life], timeout=CLOSE_SECONDS)
