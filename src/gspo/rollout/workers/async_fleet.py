"""An asynchronous fleet: workers generate by themselves, across weight updates, while the trainer trains.

    sampler thread              callback threads, one per connection       worker process
      submit ── assign ─────────────────────────────── submit, pump ────▶  queue
                                                                           generate for 0.05 s
      step() ◀── _changed ───── _on_answer ◀──────────────── groups ─────  pump answered
      waits 0.05 s at most        └─ sends the next pump ──────────────▶   (two are always queued)
    trainer thread
      load_weights ── publish, send load_weights ──────────────────────▶  between two pumps
      waits until every ready worker has answered
      _recover: replaces workers that failed or are overdue

One lock guards all state; no thread holds it while it waits for an answer. Responses go on under new weights, and every
token carries the version it was drawn under. Groups stay with their slot; those of a failed worker are generated again.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from gspo.rollout.engine import GroupRequest, check_generated
from gspo.rollout.workers.connection import Args, Connection, Result
from gspo.rollout.workers.fleet import Fleet, with_begun
from gspo.rollout.workers.lockstep_fleet import EVALUATION_TIMEOUTS
from gspo.rollout.workers.weight_store import WeightsRef
from gspo.rollout.workers.worker import RolloutWorker
from gspo.rollout.workers.worker_slot import FATAL, WorkerSlot
from gspo.types import Group

PUMP_SECONDS = 0.05  # how long new weights wait for a worker, at most, in addition to one engine step
NUM_PUMPS = 2  # pumps queued at a worker: one runs while the answer to the other travels
STEP_SECONDS = 0.05  # how long `step` waits for a group
POLL_SECONDS = 0.2  # between checks for failed workers


@dataclass(eq=False, slots=True)
class PendingCalls:
    """Calls sent to one worker and not answered yet."""

    connection: Connection
    num_calls: int = 0
    num_pumps: int = 0
    num_evaluations: int = 0
    since: float = 0.0  # when the last answer came, or the first of these calls was sent
    failure: BaseException | None = None


class AsyncFleet(Fleet):
    """A RolloutEngine whose workers wait neither for each other nor for `step`, which returns what has finished.

    One thread submits and steps; another may load weights and generate at the same time. For the same calls tokens may
    differ in their last bits, since a worker's batches depend on time.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._finished: list[tuple[GroupRequest, Group]] = []  # not returned by `step` yet
        # Versions with the calls that read them.
        self._published: list[tuple[WeightsRef, list[Future[Any]]]] = []
        self._pending: dict[int, PendingCalls] = {}  # by slot
        self._changed = threading.Condition(self._lock)

    @property
    def num_in_flight(self) -> int:
        with self._lock:
            assigned = sum(len(slot.assigned) for slot in self._slots)
            return len(self._finished) + len(self._abandoned) + assigned

    def submit(self, request: GroupRequest) -> None:
        with self._lock:
            self._prepare()
            self._assign([request])

    def step(self) -> list[Group]:
        with self._changed:
            self._prepare()
            if not self._finished and any(slot.assigned for slot in self._slots):
                self._changed.wait(STEP_SECONDS)
            self._recover()
            finished, self._finished = self._finished, []
        return sorted((group for _, group in finished), key=lambda group: group.submission)

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        """Spread over the workers, which interrupt their groups in flight for it."""
        waiting = list(enumerate(requests))
        done: dict[int, Group] = {}
        running: dict[Future[list[Group]], list[tuple[int, GroupRequest]]] = {}
        while waiting or running:
            with self._changed:
                self._prepare()
                self._recover()
                slots = self._slots_with_worker()
                for place, slot in enumerate(slots):
                    if share := waiting[place :: len(slots)]:
                        running[self._send(slot, RolloutWorker.generate, [r for _, r in share])] = share
                waiting = [] if slots else waiting
                if not running and waiting:  # every slot is in a back-off
                    self._changed.wait(POLL_SECONDS)
            for answer in wait(running, POLL_SECONDS, FIRST_COMPLETED).done:
                share = running.pop(answer)
                error = answer.exception()
                if isinstance(error, FATAL):
                    raise error
                if error is None:
                    groups = check_generated([request for _, request in share], answer.result())
                    done |= dict(zip((place for place, _ in share), groups))
                else:
                    waiting += share
        return [done[place] for place in range(len(requests))]

    def load_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Make `weights` live, or the source's when None. Returns when no worker draws tokens from older ones."""
        ref = self._publish(weights, version)
        with self._lock:
            self._go_live(ref, version)
            loads = {slot: self._load(slot) for slot in self._slots_with_worker()}
        for slot, answer in loads.items():
            # A worker that is not ready has drawn nothing, and will load these weights before it does.
            while not wait([answer], POLL_SECONDS).done and slot.is_ready:
                with self._lock:
                    self._recover()
        with self._lock:
            self._discard_old_versions()
            self._recover()

    def unfinished(self) -> list[GroupRequest]:
        """What is in flight, or finished and not returned by `step` yet, as of about now; the workers go on."""
        with self._lock:
            self._prepare()
            answers = [
                self._send(slot, RolloutWorker.unfinished) for slot in self._slots_with_worker() if slot.assigned
            ]
        self._wait_for(answers)
        begun: dict[int, GroupRequest] = {}
        for answer in answers:
            begun |= {} if answer.exception() else answer.result()
        with self._lock:
            found = [
                dataclasses.replace(request, prompt=group.prompt, partial=group.rollouts)
                for request, group in self._finished
            ]
            for slot in self._slots:
                found += with_begun(slot.assigned.values(), begun)
            found += self._abandoned
        return sorted(found, key=lambda request: request.submission)

    def clear(self) -> None:
        with self._lock:
            self._finished, self._abandoned = [], []
            for slot in self._slots:
                slot.assigned = {}
            answers = [self._send(slot, RolloutWorker.take_back) for slot in self._slots_with_worker()]
        self._wait_for(answers)

    def _slots_with_worker(self) -> list[WorkerSlot]:
        """The slots that are not in a back-off."""
        return [slot for slot in self._slots if slot.restart_at is None]

    def _wait_for(self, answers: Sequence[Future[Any]]) -> None:
        """Wait for answers. A worker that is overdue is replaced, which fails its calls."""
        while wait(answers, POLL_SECONDS).not_done:
            with self._lock:
                self._recover()

    def _go_live(self, ref: WeightsRef, version: int) -> None:
        super()._go_live(ref, version)
        self._published.append((ref, []))

    def _withdraw(self, slot: WorkerSlot) -> list[GroupRequest]:
        self._pending.pop(slot.index, None)
        return slot.take_assigned()

    def _assign(self, requests: Sequence[GroupRequest]) -> None:
        """Send groups to slots, each to the least loaded. A slot in a back-off gets them when it has a worker again."""
        for request in sorted(requests, key=lambda request: request.submission):
            slots = self._slots_with_worker()
            slot = self._least_loaded(slots or self._slots)
            slot.assigned[request.submission] = request
            if slots:
                self._send(slot, RolloutWorker.submit, [request])
                self._pump(slot)

    def _load(self, slot: WorkerSlot) -> Future[None]:
        answer = self._send(slot, RolloutWorker.load_weights, self._ref, self._version)
        self._published[-1][1].append(answer)
        return answer

    def _pump(self, slot: WorkerSlot) -> None:
        pending = self._pending[slot.index]
        while slot.assigned and pending.num_pumps < NUM_PUMPS:
            pending.num_pumps += 1
            self._send(slot, RolloutWorker.pump, PUMP_SECONDS)

    def _send(self, slot: WorkerSlot, method: Callable[[RolloutWorker, *Args], Result], *args: *Args) -> Future[Result]:
        """Make a call whose answer goes to `_on_answer`. Under the lock."""
        pending = self._pending.get(slot.index)
        if pending is None or pending.connection is not slot.connection:
            pending = self._pending[slot.index] = PendingCalls(slot.connection)
        if pending.num_calls == 0:
            pending.since = time.monotonic()
        pending.num_calls += 1
        pending.num_evaluations += method is RolloutWorker.generate
        answer = slot.connection.send(method, *args)
        answer.add_done_callback(partial(self._on_answer, slot, pending, method))
        return answer

    def _on_answer(
        self, slot: WorkerSlot, pending: PendingCalls, method: Callable[..., Any], answer: Future[Any]
    ) -> None:
        """Record an answer, in the thread that brings it: keep what finished and send the next pump."""
        with self._changed:
            if pending is not self._pending.get(slot.index) or slot.closed:
                return  # of a worker that has been replaced: its groups are generated again
            pending.num_calls -= 1
            pending.num_evaluations -= method is RolloutWorker.generate
            pending.since = time.monotonic()
            error = answer.exception()
            if error is not None:
                pending.failure = pending.failure or error
            elif method is RolloutWorker.pump:
                pending.num_pumps -= 1
                requests = dict(slot.assigned)
                for group in slot.record_finished(answer.result()):
                    self._finished.append((requests[group.submission], group))
                self._pump(slot)
            self._changed.notify_all()

    def _recover(self) -> None:
        """End workers that failed or are overdue, and start new ones where the back-off is over. Under the lock."""
        for slot in self.slots:
            if slot.restart_at is None and (failure := self._failure_of(slot)) is not None:
                self._pending.pop(slot.index)
                self._or_give_up(slot, partial(slot.mark_failed, failure))
            if not slot.closed and slot.restart_at is not None and time.monotonic() >= slot.restart_at:
                slot.restart()
                self._load(slot)
                if slot.assigned:
                    self._send(slot, RolloutWorker.submit, list(slot.assigned.values()))
                    self._pump(slot)
        self._reassign_abandoned()

    def _failure_of(self, slot: WorkerSlot) -> BaseException | None:
        """Why a slot's worker must be replaced, or None; an error that another worker would repeat is raised."""
        pending = self._pending.get(slot.index)
        if pending is None:
            return None
        if isinstance(pending.failure, FATAL):
            raise pending.failure
        num_timeouts = EVALUATION_TIMEOUTS if pending.num_evaluations else 1.0
        if pending.failure is None and pending.num_calls and slot.is_overdue(pending.since, num_timeouts):
            return TimeoutError()
        return pending.failure

    def _discard_old_versions(self) -> None:
        """Free versions that are not live and that no worker is still reading."""
        for ref, loads in self._published[:-1]:
            if all(answer.done() for answer in loads):
                self._store.discard(ref)
        self._published = [
            entry for entry in self._published if entry[0] is self._ref or not all(a.done() for a in entry[1])
        ]
