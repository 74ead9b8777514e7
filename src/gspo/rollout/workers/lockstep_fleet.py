"""A fleet in step: many rollout workers behind the interface of one engine, as reproducible as one.

`step` is a barrier: every worker with groups in flight makes one engine step. Which worker gets a group depends only
on the groups, never on time, and when new weights come all unfinished groups are dealt out anew. So for the same calls
a fleet gives the same tokens, after a resume and after the loss of a worker too: its successor is given the same calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from torch import Tensor

from gspo.rollout.engine import GroupRequest
from gspo.rollout.workers.fleet import Fleet
from gspo.rollout.workers.worker_slot import WorkerSlot
from gspo.types import Group, Rollout

EVALUATION_PATIENCE = 10.0  # deadlines that a whole `generate` may take


class LockstepFleet(Fleet):
    """A RolloutEngine over workers in processes of their own, one step at a time. Calls come from one thread."""

    @property
    def num_in_flight(self) -> int:
        return len(self._orphans) + sum(len(member.assigned) for member in self._members)

    def submit(self, request: GroupRequest) -> None:
        self._prepare()
        self._deal([request])

    def step(self) -> list[Group]:
        self._prepare()
        running = [member for member in self._members if member.assigned]
        for member in running:
            member.call("step")
        groups = [
            g for member in running for g in member.finished(self._unless_lost(member, member.answer) or [])
        ]
        self._deal_orphans()
        return sorted(groups, key=lambda group: group.submission)

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        waiting = list(enumerate(requests))
        done: dict[int, Group] = {}
        while waiting:
            self._prepare()
            members, left = list(self._members), []
            shares = [(m, waiting[i :: len(members)]) for i, m in enumerate(members)]
            tickets = [(m, s, m.connection.send("generate", [r for _, r in s])) for m, s in shares if s]
            for member, share, ticket in tickets:
                asked = [request for _, request in share]
                groups = self._unless_lost(
                    member,
                    lambda m=member, t=ticket, a=asked: m.ask(
                        "generate", a, patience=EVALUATION_PATIENCE, ticket=t
                    ),
                )
                if groups is None:
                    left += share  # its member was given up: the others take it
                else:
                    done |= dict(zip((place for place, _ in share), groups))
            waiting = left
        self._deal_orphans()
        return [done[place] for place in range(len(requests))]

    def load_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Make `weights` live, or the source's when None, and deal out what is in flight anew."""
        _, left = self._change_members()
        before, self._ref = self._ref, self._publish(weights, version)
        self._version = version
        everybody = [*left, *self._members]
        for member in everybody:
            member.call("load_weights", self._ref, version)
            member.call("take_back")
        begun: dict[int, tuple[Rollout, ...]] = {}
        for member in everybody:
            begun |= self._unless_lost(member, member.answer) or {}
        requests = [request for member in everybody for request in member.take()] + self._orphans
        self._orphans = [dataclasses.replace(r, partial=begun.get(r.submission, r.partial)) for r in requests]
        for member in self._members:
            member.begin_anew([("load_weights", (self._ref, version))])
        for member in left:
            self._dismiss(member)
        if before is not None:
            self._store.discard(before)
        self._deal_orphans()

    def rest(self) -> None:
        """Training is about to use the device: have the workers give back what memory they can, until they are needed."""
        for member in self._members:
            member.call("rest")
        for member in list(self._members):
            self._unless_lost(member, member.answer)

    def unfinished(self) -> list[GroupRequest]:
        found: list[GroupRequest] = []
        for member in [m for m in self._members if m.assigned]:
            begun = self._unless_lost(member, lambda m=member: m.ask("unfinished")) or {}
            found += [
                dataclasses.replace(r, partial=begun.get(s, r.partial)) for s, r in member.assigned.items()
            ]
        found += self._orphans
        self._deal_orphans()
        return sorted(found, key=lambda request: request.submission)

    def clear(self) -> None:
        for member in self._members:
            member.call("take_back")
        for member in list(self._members):
            self._unless_lost(member, member.answer)
        for member in self._members:
            member.take()
            member.begin_anew([] if self._ref is None else [("load_weights", (self._ref, self._version))])
        self._orphans = []

    def _prepare(self) -> None:
        """Let members join and leave, and publish the first weights."""
        joined, left = self._change_members()
        if self._ref is None:
            self._ref = self._publish(None, self._version)
            joined = self._members
        for member in joined:
            member.call("load_weights", self._ref, self._version)
        for member in left:
            begun = self._unless_lost(member, lambda m=member: m.ask("take_back")) or {}
            self._orphans += [
                dataclasses.replace(r, partial=begun.get(r.submission, r.partial)) for r in member.take()
            ]
            self._dismiss(member)
        self._deal_orphans()

    def _deal(self, requests: Sequence[GroupRequest]) -> None:
        """Give groups to members, in order of submission, each to the least loaded."""
        shares: dict[WorkerSlot, list[GroupRequest]] = {}
        for request in sorted(requests, key=lambda request: request.submission):
            member = self._lightest(self._members)
            member.assigned[request.submission] = request
            shares.setdefault(member, []).append(request)
        for member, share in shares.items():
            member.call("submit", share)
