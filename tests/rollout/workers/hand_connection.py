"""A connection whose answers are given by hand, so that a test decides what is answered when."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from gspo.rollout.workers.connection import WorkerDied


class HandConnection:
    """Keeps every call; `answer` answers the oldest open one of a method, `at_once` answers some by themselves."""

    def __init__(self, index: int, at_once: dict[str, Callable[..., Any]] | None = None) -> None:
        self.name = f"rollout worker {index}"
        self.alive = True
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.ended: list[str] = []
        self._at_once = at_once or {}
        self._open: list[tuple[str, Future[Any]]] = []

    def send(self, method: Callable[..., Any], *args: Any) -> Future[Any]:
        name, answer = method.__name__, Future()
        self.calls.append((name, args))
        if name in self._at_once:
            answer.set_result(self._at_once[name](*args))
        else:
            self._open.append((name, answer))
        return answer

    def answer(self, method: str, result: Any = None) -> None:
        found = next(pair for pair in self._open if pair[0] == method)
        self._open.remove(found)
        if isinstance(result, BaseException):
            found[1].set_exception(result)
        else:
            found[1].set_result(result)

    def names(self) -> list[str]:
        return [name for name, _ in self.calls]

    def num_open(self, method: str) -> int:
        return sum(name == method for name, _ in self._open)

    def stacks(self) -> str:
        return ""

    def kill(self, reason: str = "it was killed") -> None:
        self.ended.append(f"kill: {reason}")
        self.alive = False
        opened, self._open = self._open, []
        for _, answer in opened:
            answer.set_exception(WorkerDied(f"{self.name}: {reason}"))

    def close(self) -> None:
        self.ended.append("close")
