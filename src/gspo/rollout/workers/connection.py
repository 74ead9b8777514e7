"""How a fleet reaches one rollout worker, wherever it runs: calls answered in order until the worker ends."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar, TypeVarTuple

from gspo.rollout.workers.worker import RolloutWorker

Args = TypeVarTuple("Args")
Result = TypeVar("Result")


class WorkerDied(RuntimeError):
    """The worker ended before it answered. The message says how it ended, root cause first."""


class WorkersLost(RuntimeError):
    """No rollout worker is left that stays alive. The message begins with the root cause."""


class FleetClosed(RuntimeError):
    """Another thread closed the fleet during a call."""


class Connection(Protocol):
    """One RolloutWorker in a process of its own. Every method may be called from any thread and returns at once.

    Creating a connection starts the worker and does not wait for it: the first answers come when its engine is built.
    The worker makes one call at a time, in the order they were sent, and answers in that order.
    """

    name: str
    """For messages, such as `rollout worker 1 (process 4711)`."""

    @property
    def alive(self) -> bool:
        """Whether calls can still be answered. False once the worker has ended or been killed."""
        ...

    def send(self, method: Callable[[RolloutWorker, *Args], Result], *args: *Args) -> Future[Result]:
        """Call a method of the worker, such as `RolloutWorker.step`; only its name and the arguments travel.

        The future's exception is the one raised by the worker (WorkerError when it cannot be pickled), or WorkerDied,
        which every unanswered call gets when the worker ends. Calls to an ended worker fail in the same way.
        """
        ...

    def stacks(self) -> str:
        """What the worker is doing now, for a watchdog; "" when it does not answer. May take a second."""
        ...

    def kill(self, reason: str = "it was killed") -> None:
        """End the worker at once, whatever it does; unanswered calls fail with WorkerDied and `reason`."""

    def close(self) -> None:
        """End the worker, gently if it answers, and wait until it is gone. May be called twice."""
