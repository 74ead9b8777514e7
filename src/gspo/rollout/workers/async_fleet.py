"""A free-running fleet: workers generate by themselves, across weight updates, while the trainer trains.

A worker always has calls of `pump` waiting, each sent when another is answered, so it never waits for the trainer's
threads. New weights reach it between two pumps: its running responses go on under them, and every token carries the
version it was drawn under. Groups stay where they are; a dead worker's are generated again from their requests.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from gspo.rollout.engine import GroupRequest
from gspo.rollout.workers.connection import Connection, Ticket
from gspo.rollout.workers.fleet import Fleet
from gspo.rollout.workers.lockstep_fleet import EVALUATION_PATIENCE
from gspo.rollout.workers.weight_store import WeightsRef
from gspo.rollout.workers.worker_slot import FATAL, WorkerSlot
from gspo.types import Group, Rollout

PUMP_SECONDS = 0.05  # how long new weights wait for a worker, at most, beside one engine step
NUM_PUMPS = 2  # calls that wait at a worker: one running, one to go on with
STEP_SECONDS = 0.05  # how long `step` waits for a group
LOOK_SECONDS = 0.2  # between looks at who has died


@dataclass(eq=False, slots=True)
class PendingCalls:
    """The calls under way at one worker: how many, since when an answer is owed, and what went wrong."""

    connection: Connection
    num_owed: int = 0
    num_pumps: int = 0
    num_evaluations: int = 0
    since: float = 0.0
    failure: BaseException | None = None


class AsyncFleet(Fleet):
    """A RolloutEngine whose workers do not wait for each other, nor for `step`, which hands out what has finished.

    One thread submits and steps; another may load weights and generate at the same time. For the same calls tokens may
    differ in their last bits, since a worker's batches depend on time.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._finished: list[tuple[GroupRequest, Group]] = []  # not handed out yet
        self._published: list[
            tuple[WeightsRef, list[Ticket[Any]]]
        ] = []  # versions with the calls that read them
        self._pulses: dict[int, PendingCalls] = {}  # by member
        self._news = threading.Condition(self._lock)

    @property
    def num_in_flight(self) -> int:
        with self._lock:
            held = sum(len(member.assigned) for member in self._members)
            return len(self._finished) + len(self._orphans) + held

    def submit(self, request: GroupRequest) -> None:
        with self._lock:
            self._prepare()
            self._deal([request])

    def step(self) -> list[Group]:
        with self._news:
            self._prepare()
            if not self._finished and any(member.assigned for member in self._members):
                self._news.wait(STEP_SECONDS)
            self._mend()
            finished, self._finished = self._finished, []
        return sorted((group for _, group in finished), key=lambda group: group.submission)

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        """Spread over the workers, which interrupt their groups in flight for it."""
        waiting = list(enumerate(requests))
        done: dict[int, Group] = {}
        running: dict[Ticket[Any], list[tuple[int, GroupRequest]]] = {}
        while waiting or running:
            with self._news:
                self._prepare()
                self._mend()
                seated = [member for member in self._members if member.restart_at is None]
                for place, member in enumerate(seated):
                    if share := waiting[place :: len(seated)]:
                        running[self._send(member, "generate", [r for _, r in share])] = share
                waiting = [] if seated else waiting
                if not running and waiting:
                    self._news.wait(LOOK_SECONDS)  # everybody is in a back-off
            for ticket in wait(running, LOOK_SECONDS, FIRST_COMPLETED).done:
                share = running.pop(ticket)
                error = ticket.exception()
                if isinstance(error, FATAL):
                    raise error
                if error is None:
                    done |= dict(zip((place for place, _ in share), ticket.result()))
                else:
                    waiting += share
        return [done[place] for place in range(len(requests))]

    def load_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Make `weights` live, or the source's when None. Returns when no worker draws tokens from older ones."""
        ref = self._publish(weights, version)
        with self._lock:
            self._ref, self._version = ref, version
            self._published.append((ref, []))
            loads = {m: self._load(m) for m in self._members if m.restart_at is None}
        for member, ticket in loads.items():
            # A worker that is not up yet has drawn nothing, and will load these weights before it does.
            while not wait([ticket], LOOK_SECONDS).done and member.is_up:
                with self._lock:
                    self._mend()
        with self._lock:
            self._tidy()
            self._mend()

    def unfinished(self) -> list[GroupRequest]:
        """What is in flight, or finished and not handed out, as of about now; the workers go on."""
        with self._lock:
            self._prepare()
            busy = [m for m in self._members if m.assigned and m.restart_at is None]
            asked = [self._send(member, "unfinished") for member in busy]
        self._await(asked)
        begun: dict[int, tuple[Rollout, ...]] = {}
        for ticket in asked:
            begun |= {} if ticket.exception() else ticket.result()
        with self._lock:
            found = [
                dataclasses.replace(request, partial=group.rollouts) for request, group in self._finished
            ]
            for member in self._members:
                found += [
                    dataclasses.replace(r, partial=begun.get(s, r.partial))
                    for s, r in member.assigned.items()
                ]
            found += self._orphans
        return sorted(found, key=lambda request: request.submission)

    def clear(self) -> None:
        with self._lock:
            self._finished, self._orphans = [], []
            taken = []
            for member in self._members:
                member.assigned = {}
                if member.restart_at is None:
                    taken.append(self._send(member, "take_back"))
        self._await(taken)

    def _await(self, tickets: Sequence[Ticket[Any]]) -> None:
        """Wait for answers. A worker that owes one for too long is replaced, which answers its tickets with that."""
        while wait(tickets, LOOK_SECONDS).not_done:
            with self._lock:
                self._mend()

    def _prepare(self) -> None:
        """Let members join and leave, and publish the first weights. Under the lock."""
        joined, left = self._change_members()
        if self._ref is None:
            self._ref = self._publish(None, self._version)
            self._published.append((self._ref, []))
            joined = self._members
        for member in joined:
            self._load(member)
        for member in left:
            self._orphans += member.take()
            self._pulses.pop(member.index, None)
            self._dismiss(member)
        self._deal_orphans()

    def _deal(self, requests: Sequence[GroupRequest]) -> None:
        """Give groups to members, each to the least loaded. One that is in a back-off gets them when it is back."""
        for request in sorted(requests, key=lambda request: request.submission):
            seated = [member for member in self._members if member.restart_at is None]
            member = self._lightest(seated or self._members)
            member.assigned[request.submission] = request
            if seated:
                self._send(member, "submit", [request])
                self._pump(member)

    def _load(self, member: WorkerSlot) -> Ticket[Any]:
        ticket = self._send(member, "load_weights", self._ref, self._version)
        self._published[-1][1].append(ticket)
        return ticket

    def _pump(self, member: WorkerSlot) -> None:
        pulse = self._pulses[member.index]
        while member.assigned and pulse.num_pumps < NUM_PUMPS:
            pulse.num_pumps += 1
            self._send(member, "pump", PUMP_SECONDS)

    def _send(self, member: WorkerSlot, method: str, *args: Any) -> Ticket[Any]:
        """Make a call and note its answer when it comes. Under the lock."""
        pulse = self._pulses.get(member.index)
        if pulse is None or pulse.connection is not member.connection:
            pulse = self._pulses[member.index] = PendingCalls(member.connection)
        if pulse.num_owed == 0:
            pulse.since = time.monotonic()
        pulse.num_owed += 1
        pulse.num_evaluations += method == "generate"
        ticket = member.connection.send(method, *args)
        ticket.add_done_callback(partial(self._answered, member, pulse, method))
        return ticket

    def _answered(self, member: WorkerSlot, pulse: PendingCalls, method: str, ticket: Ticket[Any]) -> None:
        """Take an answer, in the thread that brings it: keep what finished and keep the worker busy."""
        with self._news:
            if pulse is not self._pulses.get(member.index) or member.closed:
                return  # of a worker that has been replaced: its groups are generated again
            pulse.num_owed -= 1
            pulse.num_evaluations -= method == "generate"
            pulse.since = time.monotonic()
            error = ticket.exception()
            if error is not None:
                pulse.failure = pulse.failure or error
            elif method == "pump":
                pulse.num_pumps -= 1
                requests = dict(member.assigned)
                for group in member.finished(ticket.result()):
                    self._finished.append((requests[group.submission], group))
                self._pump(member)
            self._news.notify_all()

    def _mend(self) -> None:
        """Bury those that died or hang, and fill empty seats whose back-off is over. Under the lock."""
        for member in list(self._members):
            pulse = self._pulses.get(member.index)
            if member.restart_at is None and pulse is not None:
                failure = pulse.failure
                if isinstance(failure, FATAL):
                    raise failure
                patience = EVALUATION_PATIENCE if pulse.num_evaluations else 1.0
                if failure is None and pulse.num_owed and member.hangs(pulse.since, patience):
                    failure = TimeoutError()
                if failure is not None:
                    self._pulses.pop(member.index)
                    self._unless_lost(member, partial(member.bury, failure))
            if not member.closed and member.restart_at is not None and time.monotonic() >= member.restart_at:
                member.restart()
                self._load(member)
                if member.assigned:
                    self._send(member, "submit", list(member.assigned.values()))
                    self._pump(member)
        self._deal_orphans()

    def _tidy(self) -> None:
        """Free versions that are not live and that nobody is still reading."""
        for ref, loads in self._published[:-1]:
            if all(ticket.done() for ticket in loads):
                self._store.discard(ref)
        self._published = [
            entry for entry in self._published if entry[0] is self._ref or not all(t.done() for t in entry[1])
        ]
