"""The interface to the trainer ranks: one controller, and a RankWorker in every process that trains.

                      call(RankWorker.update, batch, …)
    loop ── RankGroup ───────────────┬──────────────────┬─────────────── …
    (controller)                rank 0: RankWorker   rank 1: RankWorker
            ◄── results by rank ──── gather ────────────┘

The controller waits until every rank has answered; inside a call the ranks wait for each other in collectives.
Implementations differ in how a call travels: `TorchrunRanks` broadcasts it over gloo (the controller is rank 0),
`RayRanks` sends it to actors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class RankFailed(RuntimeError):
    """A trainer rank raised an error or disappeared. The message begins with the rank and the cause."""


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One rank's number, its number on its machine, its device ("cpu", "cuda:1"), and the address of the ranks' store."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    device: str


class RankGroup(Protocol):
    """All ranks. One thread makes the calls, one after another; other threads may call `stacks` meanwhile."""

    world_size: int

    def call(self, method: Callable[..., Any], *args: Any) -> list[Any]:
        """Run a method of RankWorker on every rank with the same arguments. Returns the results by rank.

        The method is sent by name, so a worker class may override it. Arguments and results are pickled. An error that
        all ranks raise (a model that does not load) is raised unchanged. An error or the end of one rank is a
        RankFailed that names the rank and the root cause. After either the ranks may be out of step: only `close` may
        follow.
        """
        ...

    def stacks(self) -> str:
        """The stacks of the ranks in other processes, for the watchdog. From any thread, also during a call."""
        ...

    def close(self) -> None:
        """Free the models and end the processes that belong to the group. May be called twice."""
        ...
