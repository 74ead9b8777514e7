"""What all fleets share: slots filled and given up, workers added and removed, weights published to all of them.

    sampler or trainer thread                      any thread
      submit, step, generate, load_weights           add_worker, remove_worker, stacks, kill, close
        │                                              │
        ▼                                              ▼
      Fleet ◀── applied at the start of a call ── _joining, _removing
        ├─▶ WorkerSlot 0 ─▶ Connection ─▶ RolloutWorker in a process of its own
        ├─▶ WorkerSlot 1 ─▶ Connection ─▶ RolloutWorker
        └─▶ WeightStore ◀── workers read the published version

LockstepFleet waits for its workers in every step; AsyncFleet does not.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from gspo.metrics import Metric, Metrics
from gspo.rollout.engine import GroupRequest, RolloutEngine
from gspo.rollout.workers.connection import Connection, FleetClosed, WorkersLost
from gspo.rollout.workers.weight_store import WeightsRef, WeightStore
from gspo.rollout.workers.worker_slot import WorkerSlot, WorkerSlotLost

WORKER_TIMEOUT = 300.0
WeightSource = Callable[[], AbstractContextManager[Mapping[str, Tensor]]]
"""Gives the trainer's current weights, under the names of the plain model, for as long as its context lasts."""


class Fleet(RolloutEngine):
    """Worker slots behind one engine. `connect(index)` starts a worker; `weights` is read when new ones are published.

    A slot whose workers keep failing is given up and its groups are reassigned to the others; when none is left
    WorkersLost is raised, root cause first. `notify` receives one message for every such event.
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
        self._abandoned: list[GroupRequest] = []  # groups in flight that no slot holds
        self._num_slots_made = self._num_lost = self._num_restarts_of_removed = 0
        self._joining: list[WorkerSlot] = []
        self._removing: set[int] = set()
        self._closed = False
        self._loss_message = ""
        self._closing: list[threading.Thread] = []
        self._slots: list[WorkerSlot] = []
        self._slots = [self._new_slot() for _ in range(num_workers)]

    def _new_slot(self) -> WorkerSlot:
        self._num_slots_made += 1
        return WorkerSlot(self._num_slots_made - 1, self._connect, self._timeout, self._notify)

    @property
    def slots(self) -> tuple[WorkerSlot, ...]:
        """The slots that take part now."""
        return tuple(self._slots)

    @property
    def num_workers(self) -> int:
        """Workers that take part, or will from the next call on."""
        with self._lock:
            return len(self._slots) + len(self._joining) - len(self._removing)

    def add_worker(self) -> int:
        """Start one more worker, from any thread; returns its number. It takes part from the next call on."""
        with self._lock:
            if self._closed:
                raise FleetClosed
            slot = self._new_slot()
            self._joining.append(slot)
        self._notify(f"{slot.name} is added")
        return slot.index

    def remove_worker(self, index: int | None = None) -> int:
        """Remove a worker, by default the newest, from any thread; returns its number. Its groups go to the others."""
        with self._lock:
            staying = [s.index for s in [*self._slots, *self._joining] if s.index not in self._removing]
            if len(staying) < 2:
                raise ValueError("the last rollout worker cannot be removed; add another first")
            index = staying[-1] if index is None else index
            if index not in staying:
                raise ValueError(f"there is no rollout worker {index}; there are {staying}")
            self._removing.add(index)
        return index

    def _apply_membership(self) -> tuple[list[WorkerSlot], list[WorkerSlot]]:
        """Apply pending joins and removals. Returns (joined, removed); removed slots still hold their groups."""
        with self._lock:
            if self._closed:
                raise FleetClosed
            if not self._slots and not self._joining:
                raise WorkersLost(self._loss_message)
            joined, self._joining = self._joining, []
            everybody = [*self._slots, *joined]
            removed = [s for s in everybody if s.index in self._removing]
            if len(removed) == len(everybody):  # those that should have stayed have been lost since
                removed = []
            self._slots = [s for s in everybody if s not in removed]
            self._removing.clear()
        for slot in removed:
            self._notify(f"{slot.name} is removed; its {len(slot.assigned)} groups go to the others")
        return [slot for slot in joined if slot not in removed], removed

    def _prepare(self) -> None:
        """Apply pending joins and removals, and publish the first weights. AsyncFleet calls it under the lock."""
        joined, removed = self._apply_membership()
        if self._ref is None:
            self._go_live(self._publish(None, self._version), self._version)
            joined = self._slots
        for slot in joined:
            self._load(slot)
        for slot in removed:
            self._abandoned += self._withdraw(slot)
            self._close_in_background(slot)
        self._reassign_abandoned()

    @abstractmethod
    def _load(self, slot: WorkerSlot) -> Any:
        """Send the live weights to a slot's worker."""

    @abstractmethod
    def _withdraw(self, slot: WorkerSlot) -> list[GroupRequest]:
        """Take back the groups of a removed slot."""

    def _go_live(self, ref: WeightsRef, version: int) -> None:
        self._ref, self._version = ref, version

    def _publish(self, weights: Mapping[str, Tensor] | None, version: int) -> WeightsRef:
        """Put weights, the source's when None, where workers can read them."""
        if weights is not None:
            return self._store.publish(weights, version)
        with self._weights() as current:
            return self._store.publish(current, version)

    def _or_give_up(self, slot: WorkerSlot, action: Callable[[], Any]) -> Any:
        """What `action` returns, or None when the slot was lost over it and given up."""
        try:
            return action()
        except WorkerSlotLost as lost:
            cause = lost
        with self._lock:
            self._num_lost += 1
            self._slots = [s for s in self._slots if s is not slot]
            self._num_restarts_of_removed += slot.num_restarts
            self._abandoned += slot.take_assigned()
            slot.closed = True
        if not self._slots and not self._joining:
            self._loss_message = f"{cause}\nno rollout worker is left"
            raise WorkersLost(self._loss_message) from cause
        self._notify(f"{cause}\nit is given up; {len(self._slots)} rollout workers go on")
        return None

    def _reassign_abandoned(self) -> None:
        """Assign the groups of slots that were given up; while no slot is left they wait for one that joins."""
        if self._slots:
            abandoned, self._abandoned = self._abandoned, []
            self._assign(abandoned)

    @abstractmethod
    def _assign(self, requests: Sequence[GroupRequest]) -> None:
        """Send groups to slots."""

    @staticmethod
    def _least_loaded(slots: Sequence[WorkerSlot]) -> WorkerSlot:
        """The slot that gets the next group: the one with the fewest responses, the first of equals."""
        return min(slots, key=lambda slot: (slot.num_responses, slot.index))

    def _close_in_background(self, slot: WorkerSlot) -> None:
        """Let a removed worker end by itself; only `close` waits for it."""
        if not slot.closed:  # else it was lost over its removal, and counted there
            self._num_restarts_of_removed += slot.num_restarts
        slot.closed = True
        thread = threading.Thread(target=slot.close, name="gspo-rollout-close", daemon=True)
        thread.start()
        self._closing.append(thread)

    def close(self) -> None:
        """End every worker and free the weights. May be called twice, and from any thread."""
        with self._lock:
            self._closed = True
            slots, self._joining = [*self._slots, *self._joining], []
        for slot in slots:
            slot.closed = True
        for slot in slots:
            slot.close()
        for thread in self._closing:
            thread.join()
        self._store.close()

    def kill(self) -> None:
        self._closed = True
        for slot in [*self._slots, *self._joining]:
            slot.closed = True
            slot.connection.kill("the run ended")

    def stacks(self) -> str:
        return "\n".join(f"{s.name}:\n{s.connection.stacks() or 'gave no answer'}" for s in self.slots)

    def metrics(self) -> Metrics:
        slots = self.slots
        restarts = self._num_restarts_of_removed + sum(slot.num_restarts for slot in slots)
        return {
            "rollout/num_workers": Metric("last", len(slots)),
            "rollout/worker_restarts": Metric("last", restarts),
            "rollout/workers_lost": Metric("last", self._num_lost),
        }


def with_begun(requests: Iterable[GroupRequest], begun: Mapping[int, GroupRequest]) -> list[GroupRequest]:
    """The requests as workers returned them, with what they have begun; `begun` is by submission."""
    return [begun.get(request.submission, request) for request in requests]
