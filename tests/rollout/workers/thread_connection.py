"""Connections to workers in threads of this process: a fleet without the start-up of processes."""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from gspo.processes import portable_error
from gspo.rollout.engine import RolloutEngine
from gspo.rollout.workers.connection import WorkerDied
from gspo.rollout.workers.worker import RolloutWorker


class ThreadConnection:
    """A Connection to a RolloutWorker over an engine that `make` builds, in a thread. SystemExit ends the worker."""

    def __init__(self, make: Callable[[], RolloutEngine], index: int) -> None:
        self.name = f"rollout worker {index}"
        self.log: list[str] = []  # names of the methods that were called
        self._make = make
        self._ending: str | None = None
        self._lock = threading.Lock()
        self._waiting: list[Future[Any]] = []
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    @property
    def alive(self) -> bool:
        return self._ending is None

    def send(self, method: Callable[..., Any], *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        with self._lock:
            if self._ending is None:
                self._waiting.append(answer)
                self._inbox.put((method.__name__, args, answer))
                return answer
        answer.set_exception(WorkerDied(self._ending))
        return answer

    def stacks(self) -> str:
        frame = sys._current_frames().get(self.thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def kill(self, reason: str = "it was killed") -> None:
        with self._lock:
            self._ending = self._ending or f"{self.name}: {reason}"
            waiting, self._waiting = self._waiting, []
        self._inbox.put(None)
        for answer in waiting:
            with contextlib.suppress(InvalidStateError):
                answer.set_exception(WorkerDied(self._ending))

    def close(self) -> None:
        self.kill("it was closed")

    def _run(self) -> None:
        worker, failure = RolloutWorker.__new__(RolloutWorker), None
        try:
            worker.engine, worker._requests = self._make(), {}
        except Exception as error:
            failure = error
        while (call := self._inbox.get()) is not None and self._ending is None:
            method, args, answer = call
            try:
                if failure is not None:
                    raise failure
                result, error = getattr(worker, method)(*args), None
            except SystemExit as end:
                self.kill(str(end))
                return
            except Exception as raised:
                result, error = None, portable_error(raised)
            self.log.append(method)
            with self._lock:
                if answer not in self._waiting:
                    return
                self._waiting.remove(answer)
            answer.set_result(result) if error is None else answer.set_exception(error)


class Version(dict[str, Any]):
    """A published version without tensors."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.version = version


class NoWeights:
    """A WeightStore for engines without weights; records what was published and discarded."""

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
