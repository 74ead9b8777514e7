"""The trainer's ranks as the loop sees them: one controller, and a RankWorker in every process that trains.

The loop runs in one process. What many processes do together it asks of a `RankGroup`: a method of `RankWorker`, by name, on
every rank at once. Implementations differ only in how a call travels: `TorchrunRanks` broadcasts it over gloo (rank 0
is the controller itself), Ray sends it to actors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class RankFailed(RuntimeError):
    """A trainer rank raised or is gone. The message begins with the rank and its cause."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank stands: its number, how many there are, its number on its own machine, and where they meet.

    `address` and `port` are those of rank 0's store. `device` is what the rank trains on ("cpu", "cuda:1").
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    device: str


class RankGroup(Protocol):
    """All ranks. Calls come from one thread, one after another; `stacks` may be asked for beside them."""

    world_size: int

    def call(self, method: str, *args: Any) -> list[Any]:
        """Run `RankWorker.<method>(*args)` on every rank with the same arguments; the results by rank.

        Arguments and results are pickled. An error that every rank meets alike (a model that does not load) is raised
        as itself; one rank's own error, or its end, is a RankFailed that names the rank and the root cause. After
        either the ranks may be out of step: the only call left is `close`.
        """
        ...

    def stacks(self) -> str:
        """What the ranks in other processes are doing now, for a watchdog: from any thread, while a call is under way."""
        ...

    def close(self) -> None:
        """End the ranks' work: models are freed; processes that belong to the team end. May be called twice."""
        ...
