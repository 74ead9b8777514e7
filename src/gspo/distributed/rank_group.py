"""The trainer's ranks as the loop sees them: one controller, and a RankWorker in every process that trains.

                      call(RankWorker.update, batch, …)
    loop ── RankGroup ───────────────┬──────────────────┬─────────────── …
    (controller)                rank 0: RankWorker   rank 1: RankWorker
            ◄── results by rank ──── gather ────────────┘

The controller waits until every rank has answered; inside a call the ranks wait for each other in collectives.
Implementations differ only in how a call travels: `TorchrunRanks` broadcasts it over gloo (rank 0 is the controller's
own process), `RayRanks` sends it to actors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class RankFailed(RuntimeError):
    """A trainer rank raised an error or is gone. The message begins with the rank and its cause."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank's number and device, and where the ranks meet: `address` and `port` of rank 0's store.

    `local_rank` is its number on its own machine. `device` is what it trains on ("cpu", "cuda:1").
    """

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    device: str


class RankGroup(Protocol):
    """All ranks. One thread makes the calls, one after another; `stacks` may be called beside them."""

    world_size: int

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a method of RankWorker on every rank with the same arguments. Returns the results by rank.

        The method travels by its name, so a worker class may override it. Arguments and results are pickled. An error
        that every rank meets alike (a model that does not load) is raised as itself. One rank's own error, or its end,
        is a RankFailed that names the rank and the root cause. After either the ranks may be out of step, and `close`
        is the only call left.
        """
        ...

    def stacks(self) -> str:
        """What the ranks in other processes are doing now, for the watchdog. From any thread, also during a call."""
        ...

    def close(self) -> None:
        """Free the models and end the processes that belong to the group. May be called twice."""
        ...
