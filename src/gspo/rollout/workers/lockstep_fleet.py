"""A fleet in lockstep: many rollout workers behind the interface of one engine, as reproducible as one.

    caller's thread            worker 0            worker 1
      step() ── send step ──▶  one engine step
             ── send step ──────────────────────▶  one engine step
             ◀── groups ─────  done
             ◀── groups ─────────────────────────  done
      returns when the last has answered: `step` is a barrier

Which worker gets a group depends only on the groups, never on time, and when new weights come all unfinished groups
are assigned again. So for the same calls a fleet gives the same tokens, also after a resume and after the loss of a
worker, whose replacement gets the same calls again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gspo.rollout.engine import GroupRequest, check_generated
from gspo.rollout.workers.fleet import Fleet, with_begun
from gspo.rollout.workers.worker import RolloutWorker
from gspo.rollout.workers.worker_slot import WorkerSlot
from gspo.types import Group

EVALUATION_TIMEOUTS = 10.0  # how many timeouts one `generate` may take


class LockstepFleet(Fleet):
    """A RolloutEngine over workers in processes of their own, one step at a time. Calls come from one thread."""

    @property
    def num_in_flight(self) -> int:
        return len(self._abandoned) + sum(len(slot.assigned) for slot in self._slots)

    def submit(self, request: GroupRequest) -> None:
        self._prepare()
        self._assign([request])

    def step(self) -> list[Group]:
        self._prepare()
        running = [slot for slot in self._slots if slot.assigned]
        for slot in running:
            slot.call(RolloutWorker.step)
        groups = [g for slot in running for g in slot.record_finished(self._or_give_up(slot, slot.answer) or [])]
        return sorted(groups, key=lambda group: group.submission)

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        waiting = list(enumerate(requests))
        done: dict[int, Group] = {}
        while waiting:
            self._prepare()
            slots = self.slots
            shares = [(slot, waiting[i :: len(slots)]) for i, slot in enumerate(slots)]
            asked = [
                (slot, share, slot.ask(RolloutWorker.generate, [r for _, r in share], num_timeouts=EVALUATION_TIMEOUTS))
                for slot, share in shares
                if share
            ]
            waiting = []
            for slot, share, wait_for_groups in asked:
                answer = self._or_give_up(slot, lambda wait=wait_for_groups: (wait(),))
                if answer is None:
                    waiting += share
                else:
                    groups = check_generated([request for _, request in share], answer[0])
                    done |= dict(zip((place for place, _ in share), groups))
        self._reassign_abandoned()
        return [done[place] for place in range(len(requests))]

    def load_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Make `weights` live, or the source's when None, and assign everything in flight again."""
        _, removed = self._apply_membership()
        before = self._ref
        self._go_live(self._publish(weights, version), version)
        everybody = [*removed, *self._slots]
        for slot in everybody:
            slot.call(RolloutWorker.load_weights, self._ref, version)
            slot.call(RolloutWorker.take_back)
        begun: dict[int, GroupRequest] = {}
        for slot in everybody:
            begun |= self._or_give_up(slot, slot.answer) or {}
        requests = [request for slot in everybody for request in slot.take_assigned()] + self._abandoned
        self._abandoned = with_begun(requests, begun)
        for slot in self._slots:
            slot.reset_journal((RolloutWorker.load_weights, (self._ref, version)))
        for slot in removed:
            self._close_in_background(slot)
        if before is not None:
            self._store.discard(before)
        self._reassign_abandoned()

    def rest(self) -> None:
        self._call_all(RolloutWorker.rest)

    def unfinished(self) -> list[GroupRequest]:
        found: list[GroupRequest] = []
        for slot in [s for s in self._slots if s.assigned]:
            begun = self._or_give_up(slot, slot.ask(RolloutWorker.unfinished)) or {}
            found += with_begun(slot.assigned.values(), begun)
        found += self._abandoned
        self._reassign_abandoned()
        return sorted(found, key=lambda request: request.submission)

    def clear(self) -> None:
        self._call_all(RolloutWorker.take_back)
        live = [] if self._ref is None else [(RolloutWorker.load_weights, (self._ref, self._version))]
        for slot in self._slots:
            slot.take_assigned()
            slot.reset_journal(*live)
        self._abandoned = []

    def _call_all(self, method: Callable[[RolloutWorker], Any]) -> None:
        """Call every worker and wait for all of them."""
        for slot in self._slots:
            slot.call(method)
        for slot in self.slots:
            self._or_give_up(slot, slot.answer)

    def _load(self, slot: WorkerSlot) -> None:
        slot.call(RolloutWorker.load_weights, self._ref, self._version)

    def _withdraw(self, slot: WorkerSlot) -> list[GroupRequest]:
        begun = self._or_give_up(slot, slot.ask(RolloutWorker.take_back)) or {}
        return with_begun(slot.take_assigned(), begun)

    def _assign(self, requests: Sequence[GroupRequest]) -> None:
        """Send groups to slots in order of submission, each to the least loaded."""
        shares: dict[WorkerSlot, list[GroupRequest]] = {}
        for request in sorted(requests, key=lambda request: request.submission):
            slot = self._least_loaded(self._slots)
            slot.assigned[request.submission] = request
            shares.setdefault(slot, []).append(request)
        for slot, share in shares.items():
            slot.call(RolloutWorker.submit, share)
