"""Who works in a fleet: seats filled and given up, workers added and removed, and the weights they all must have."""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from gspo.rollout.engine import GroupRequest, RolloutEngine
from gspo.rollout.workers.connection import Connection, FleetClosed, WorkersLost
from gspo.rollout.workers.weight_store import WeightsRef, WeightStore
from gspo.rollout.workers.worker_slot import WorkerSlot, WorkerSlotLost
from gspo.types import Metric, Metrics

WORKER_TIMEOUT = 300.0
WeightSource = Callable[[], AbstractContextManager[Mapping[str, Tensor]]]
"""Gives the trainer's current weights, under the names of the plain model, for as long as its context lasts."""


class Fleet(RolloutEngine):
    """The members of a fleet. `connect(index)` starts a worker; `weights` is read when new ones are published.

    A member that keeps dying is given up and its groups become `_orphans`, for the others; without others WorkersLost is
    raised, with the root cause first. `notify` is told of every such event in a sentence.
    """

    def __init__(
        self,
        connect: Callable[[int], Connection],
        num_workers: int,
        *,
        weights: WeightSource,
        store: WeightStore,
        version: int = 0,
        timeout: float = WORKER_TIMEOUT,
        notify: Callable[[str], None] | None = None,
    ) -> None:
        if num_workers < 1:
            raise ValueError(f"num_workers={num_workers}: expected at least 1")
        self._connect, self._weights, self._store = connect, weights, store
        self._timeout, self._notify = timeout, notify or (lambda message: None)
        self._lock = threading.RLock()
        self._version = version
        self._ref: WeightsRef = None  # of the live version; None before anything was published
        self._orphans: list[GroupRequest] = []
        self._num_seats = self._num_lost = self._num_restarts_of_gone = 0
        self._joining: list[WorkerSlot] = []
        self._leaving: set[int] = set()
        self._closed = False
        self._last_loss = ""
        self._farewells: list[threading.Thread] = []
        self._members: list[WorkerSlot] = []
        self._members = [self._new_member() for _ in range(num_workers)]

    def _new_member(self) -> WorkerSlot:
        self._num_seats += 1
        return WorkerSlot(self._num_seats - 1, self._connect, self._timeout, self._notify)

    @property
    def num_workers(self) -> int:
        """Workers that take part, or will from the next call on."""
        with self._lock:
            return len(self._members) + len(self._joining) - len(self._leaving)

    def add_worker(self) -> int:
        """Start one more worker, from any thread; returns its number. It takes part from the next call on."""
        with self._lock:
            if self._closed:
                raise FleetClosed
            member = self._new_member()
            self._joining.append(member)
        self._notify(f"{member.name} is added")
        return member.index

    def remove_worker(self, index: int | None = None) -> int:
        """Send a worker away, from any thread, the newest when no number is given; its groups go to the others."""
        with self._lock:
            staying = [m.index for m in [*self._members, *self._joining] if m.index not in self._leaving]
            if len(staying) < 2:
                raise ValueError("the last rollout worker cannot be removed; add another first")
            index = staying[-1] if index is None else index
            if index not in staying:
                raise ValueError(f"there is no rollout worker {index}; there are {staying}")
            self._leaving.add(index)
        return index

    def _change_members(self) -> tuple[list[WorkerSlot], list[WorkerSlot]]:
        """Let those join and leave who were to: (who joined, who left, still holding its groups)."""
        with self._lock:
            if self._closed:
                raise FleetClosed
            if not self._members and not self._joining:
                raise WorkersLost(self._last_loss)
            joined, self._joining = self._joining, []
            everybody = [*self._members, *joined]
            left = [m for m in everybody if m.index in self._leaving]
            if len(left) == len(everybody):  # those who were to stay have been lost since
                left = []
            self._members = [m for m in everybody if m not in left]
            self._leaving.clear()
        for member in left:
            self._num_restarts_of_gone += member.num_restarts
            self._notify(f"{member.name} is removed; its {len(member.assigned)} groups go to the others")
        return [member for member in joined if member not in left], left

    def _publish(self, weights: Mapping[str, Tensor] | None, version: int) -> WeightsRef:
        """Put weights, the source's when None, where workers can read them."""
        if weights is not None:
            return self._store.publish(weights, version)
        with self._weights() as current:
            return self._store.publish(current, version)

    def _unless_lost(self, member: WorkerSlot, action: Callable[[], Any]) -> Any:
        """What `action` returns, or None when the member had to be given up over it."""
        try:
            return action()
        except WorkerSlotLost as lost:
            self._give_up(member, lost)
            return None

    def _give_up(self, member: WorkerSlot, cause: WorkerSlotLost) -> None:
        with self._lock:
            self._num_lost += 1
            self._members = [m for m in self._members if m is not member]
            self._num_restarts_of_gone += member.num_restarts
            self._orphans += member.take()
            member.closed = True
        if not self._members and not self._joining:
            self._last_loss = f"{cause}\nno rollout worker is left"
            raise WorkersLost(self._last_loss) from cause
        self._notify(f"{cause}\nit is given up; {len(self._members)} rollout workers go on")

    def _deal_orphans(self) -> None:
        """Give the groups of members that were given up to the others; while there are none, they wait for who joins."""
        if self._members:
            orphans, self._orphans = self._orphans, []
            self._deal(orphans)

    @abstractmethod
    def _deal(self, requests: Sequence[GroupRequest]) -> None:
        """Give groups to members."""

    def _lightest(self, members: Sequence[WorkerSlot]) -> WorkerSlot:
        """Who gets the next group: the least loaded, the first of equals."""
        return min(members, key=lambda member: (member.num_responses, member.index))

    def _dismiss(self, member: WorkerSlot) -> None:
        """Let a worker end by itself; nobody waits for it before `close`."""
        member.closed = True
        farewell = threading.Thread(target=member.close, name="gspo-rollout-farewell", daemon=True)
        farewell.start()
        self._farewells.append(farewell)

    def close(self) -> None:
        """End every worker and free the weights. May be called twice, and from any thread."""
        with self._lock:
            self._closed = True
            members, self._joining = [*self._members, *self._joining], []
        for member in members:
            member.closed = True
        for member in members:
            member.close()
        for farewell in self._farewells:
            farewell.join()
        self._store.close()

    def kill(self) -> None:
        """End every worker at once: for a run that ends in a hurry."""
        self._closed = True
        for member in [*self._members, *self._joining]:
            member.closed = True
            member.connection.kill("the run ended")

    def stacks(self) -> str:
        """What every worker is doing now, for a watchdog."""
        members = list(self._members)
        return "\n".join(f"{m.name}:\n{m.connection.stacks() or 'gave no answer'}" for m in members)

    def metrics(self) -> Metrics:
        """Counts since the start."""
        members = list(self._members)
        restarts = self._num_restarts_of_gone + sum(member.num_restarts for member in members)
        return {
            "rollout/num_workers": Metric("last", len(members)),
            "rollout/worker_restarts": Metric("last", restarts),
            "rollout/workers_lost": Metric("last", self._num_lost),
        }
