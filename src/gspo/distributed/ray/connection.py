"""One rollout worker as a Ray actor: a Connection whose answers are futures.

controller thread                    callback threads of Ray            actor (RolloutHost)
send ── call.remote ──────────────────────────────────────────────────► call: one at a time
waits on the future ◄── _answer ◄── result or error ◄────────────────── returns
                    ◄── _end ◄───── `live` fails when the actor dies    live: never returns
stacks ── waits up to 1 s ────────────────────────────────────────────► stacks: beside a running call
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

import ray
from ray.exceptions import RayError

from gspo.distributed.rank_stacks import thread_stacks
from gspo.distributed.ray.actors import enter_folder, plain_class
from gspo.distributed.ray.errors import root_cause
from gspo.processes import portable_error
from gspo.rollout.workers.connection import Args, Result, WorkerDied
from gspo.rollout.workers.worker import EngineSpec, RolloutWorker

CLOSE_SECONDS = 5.0  # for a worker to end by itself


class RolloutHost:
    """The actor: builds the worker when it starts and runs its calls, one at a time.

    If the engine cannot be built, the actor stays and raises that error to every caller.
    """

    def __init__(self, worker_class: type, spec: EngineSpec, folder: str) -> None:
        enter_folder(folder)
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
        """Never returns, so that its caller gets an error as soon as this process ends."""
        threading.Event().wait()

    @ray.method(concurrency_group="watch")
    def stacks(self) -> str:
        """The stacks of every thread."""
        return thread_stacks()


class RayConnection:
    """Starts a worker with these actor options, and is the Connection to it."""

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
        """Call the worker's method. Ray replaces an object reference among `args` by its object."""
        answer: Future[Result] = Future()
        with self._lock:
            if self._ended is not None:
                answer.set_exception(WorkerDied(self._ended))
                return answer
            self._open.add(answer)
            call = self._actor.call.remote(method.__name__, *args)
        call.future().add_done_callback(lambda done: self._answer(answer, done))
        return answer

    def _answer(self, answer: Future, done: Future) -> None:
        error = done.exception()
        if error is None:
            self._resolve(answer, result=done.result())
        elif isinstance(cause := root_cause(error, self.name), WorkerDied):
            self._end(done)
        else:
            self._resolve(answer, error=cause)

    def _end(self, done: Future) -> None:
        """Called when the worker's process has ended."""
        error = done.exception()
        self._fail_all(str(root_cause(error, self.name)) if error is not None else f"{self.name} ended")

    def _fail_all(self, reason: str) -> None:
        """Fail every open answer, and all later calls, with the reason."""
        with self._lock:
            if self._ended is None:
                self._ended = reason
            answers, self._open = self._open, set()
        for answer in answers:
            self._resolve(answer, error=WorkerDied(self._ended))

    def _resolve(self, answer: Future, result: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            self._open.discard(answer)
        try:
            if error is None:
                answer.set_result(result)
            else:
                answer.set_exception(error)
        except InvalidStateError:
            pass  # `kill` failed this answer before its result arrived

    def stacks(self) -> str:
        """The stacks of the worker's threads; "" without an answer within a second."""
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
        """Close the worker's engine, end the worker and wait until it is gone. May be called twice."""
        if not ray.is_initialized():
            return
        if self.alive:
            ray.wait([self._actor.call.remote(RolloutWorker.close.__name__)], timeout=CLOSE_SECONDS)
        self.kill("it was closed")
        ray.wait([self._life], timeout=CLOSE_SECONDS)
