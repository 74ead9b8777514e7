"""How a fleet reaches one rollout worker, wherever it runs: calls by name, answered in order, until it dies."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Protocol

Ticket = Future
"""What a call returns at once: `done()`, `result(timeout)`, `add_done_callback`. The answer, or what went wrong."""


class WorkerDied(RuntimeError):
    """The worker ended, or was ended, before it answered. The message says how it ended, root cause first."""


class WorkersLost(RuntimeError):
    """No rollout worker is left that stays alive. The message begins with the root cause."""


class FleetClosed(RuntimeError):
    """The fleet was closed while a call was under way, by another thread."""


class Connection(Protocol):
    """One RolloutWorker in a process of its own. Every method may be called from any thread and returns at once.

    Creating a connection starts the worker and does not wait for it: the first tickets are done when its engine is
    built. Calls are carried out one at a time, in the order they were sent, and their tickets are done in that order.
    """

    name: str
    """For messages, such as `rollout worker 1 (process 4711)`."""

    @property
    def alive(self) -> bool:
        """Whether calls can still be answered. False once the worker has ended or been ended."""
        ...

    def send(self, method: str, *args: Any) -> Ticket[Any]:
        """Call `RolloutWorker.<method>(*args)`.

        The ticket's exception is the one that was raised there (WorkerError when it cannot travel), or WorkerDied,
        which every unanswered ticket gets when the worker ends. Sending to an ended worker gives such a ticket too.
        """
        ...

    def stacks(self) -> str:
        """What the worker is doing now, for a watchdog; "" when it cannot be told. May take a second."""
        ...

    def kill(self, reason: str = "it was killed") -> None:
        """End the worker at once, whatever it does; unanswered tickets get WorkerDied with `reason`."""
        ...

    def close(self) -> None:
        """End the worker, gently if it answers, and wait until it is gone. May be called twice."""
        ...
