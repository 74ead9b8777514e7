"""A run of thousands of devices, event by event: stragglers, failures, checkpoints, bounded staleness.

RolloutPart workers answer groups; the trainer takes the oldest batch under the same staleness budget as a real run. A worker
that fails loses its groups, which are generated again elsewhere. A trainer's rank that fails sends the run back to its
last checkpoint. Every group ends in exactly one place, and one seed gives one run.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo.plan.scenario import Outcome, Scenario
from gspo.sampling.staleness import StalenessBudget

DRAWS = 4096  # random numbers drawn at once
MAX_EVENTS = 20_000_000


@dataclass(slots=True)
class _Group:
    version: int
    worker: int = -1
    begun: float = 0.0
    attempt: int = 0


class Simulation:
    """The state of a simulated run; `run` goes on until `steps` steps are trained and kept."""

    def __init__(self, scenario: Scenario) -> None:
        self.s = scenario
        self.random = np.random.default_rng(scenario.seed)
        self.budget = StalenessBudget(scenario.batch, scenario.eta)
        self.now, self.version, self.number, self.epoch = 0.0, 0, 0, 0
        self.events: list[tuple[float, int, str, Any]] = []
        self.held: list[set[int]] = [set() for _ in range(scenario.workers)]
        self.up = [True] * scenario.workers
        self.free: list[tuple[int, int]] = [(0, w) for w in range(scenario.workers)]
        self.groups: dict[int, _Group] = {}  # under way, by number
        self.again: deque[int] = deque()  # lost their worker
        self.pending: Counter[int] = Counter()  # under way, by version
        self.queue: deque[int] = deque()  # versions of groups that wait for the trainer, oldest first
        self.queued: Counter[int] = Counter()
        self.training: list[int] | None = None  # versions of the batch in training
        self.blocked = False  # the trainer saves, or is down
        self.halted = False  # down
        self.saved_at, self.saved_version = 0.0, 0
        self.saved_ages: Counter[int] = Counter()
        self.out = Outcome(places=scenario.workers * scenario.places)
        self._draws: deque[tuple[float, float]] = deque()
        self.speed = self._speeds()
        grid = np.linspace(0.0, 1.0, 2049)
        self._grid, self._table = grid, np.array([scenario.lengths.quantile(float(q)) for q in grid])

    def _speeds(self) -> np.ndarray:
        s = self.s
        spread = np.exp(self.random.normal(0.0, s.sigma, s.workers)) if s.sigma > 0 else np.ones(s.workers)
        slow = self.random.random(s.workers) < s.slow_share
        return np.where(slow, spread * s.slow_factor, spread)

    def run(self) -> Outcome:
        """Simulate until enough steps are kept."""
        s = self.s
        for worker in range(s.workers):
            self._plan_failure(worker)
        self._plan_trainer_failure()
        self._admit()
        for _ in range(MAX_EVENTS):
            if self.out.steps >= s.steps:
                return self._close()
            time, _, kind, payload = heapq.heappop(self.events)
            self.now = time
            getattr(self, f"_on_{kind}")(payload)
        raise RuntimeError(
            f"the simulated run did not reach {s.steps} steps in {MAX_EVENTS:,} events: at these failures it makes no "
            f"progress (trainer fails every {s.trainer_mtbf_s:,.0f} s, a step trains {s.train_s:,.0f} s)"
        )

    def _close(self) -> Outcome:
        out = self.out
        out.seconds = self.now
        out.in_flight, out.queued, out.training = len(self.groups), len(self.queue), len(self.training or ())
        for group in self.groups.values():
            if group.worker >= 0:
                out.busy_places_s += self.now - group.begun
        return out

    def _schedule(self, delay: float, kind: str, payload: Any = None) -> None:
        self.number += 1
        heapq.heappush(self.events, (self.now + delay, self.number, kind, payload))

    def _admit(self) -> None:
        """Begin groups while the staleness budget and the workers have room; lost ones come first."""
        if self.halted or (self.s.in_turn and (self.blocked or self.training is not None)):
            return
        waiting = self.training or ()
        while self.free:
            room = self.budget.room(len(self.groups) + len(self.queue) + len(waiting))
            if self.s.in_flight is not None:
                room = min(room, self.s.in_flight - len(self.groups))
            if not self.again and room <= 0:
                return
            worker = self._place()
            if worker is None:
                return
            if self.again:
                number = self.again.popleft()
            else:
                number = self.out.submitted
                self.out.submitted += 1
                self.groups[number] = _Group(self.version)
                self.pending[self.version] += 1
            self._begin(number, worker)

    def _place(self) -> int | None:
        """The least loaded worker with a free place."""
        while self.free:
            load, worker = heapq.heappop(self.free)
            if self.up[worker] and load == len(self.held[worker]) and load < self.s.places:
                return worker
        return None

    def _begin(self, number: int, worker: int) -> None:
        group = self.groups[number]
        group.worker, group.begun, group.attempt = worker, self.now, group.attempt + 1
        self.held[worker].add(number)
        heapq.heappush(self.free, (len(self.held[worker]), worker))
        length, _ = self._draw()
        seconds = length * self._token_s(len(self.held[worker])) * float(self.speed[worker])
        self._schedule(seconds, "done", (number, group.attempt))

    def _token_s(self, load: int) -> float:
        s = self.s
        share = (load - 1) / (s.places - 1) if s.places > 1 else 1.0
        return s.single_s + share * (s.token_s - s.single_s)

    def _draw(self) -> tuple[float, float]:
        """The longest answer of a group, and a uniform number that decides whether it is kept."""
        if not self._draws:
            longest = np.interp(self.random.random(DRAWS) ** (1 / self.s.group), self._grid, self._table)
            self._draws.extend(zip(longest.tolist(), self.random.random(DRAWS).tolist()))
        return self._draws.popleft()

    def _on_done(self, payload: tuple[int, int]) -> None:
        number, attempt = payload
        group = self.groups.get(number)
        if group is None or group.worker < 0 or group.attempt != attempt:
            return  # its worker failed, or the run went back, since
        worker, begun = group.worker, group.begun
        del self.groups[number]
        self.held[worker].discard(number)
        heapq.heappush(self.free, (len(self.held[worker]), worker))
        self.out.busy_places_s += self.now - begun
        self.pending[group.version] -= 1
        if self._draw()[1] < self.s.keep_rate:
            self._enqueue(group.version)
        else:
            self.out.filtered += 1
        self._train()
        self._admit()

    def _enqueue(self, version: int) -> None:
        place = len(self.queue)
        while place and self.queue[place - 1] > version:
            place -= 1
        self.queue.insert(place, version)
        self.queued[version] += 1

    def _train(self) -> None:
        """Take the oldest batch when there is one and no younger group would take an older one's last place."""
        if self.blocked or self.training is not None:
            return
        while self.queue and self.budget.is_stale(self.queue[0], self.version):
            self.queued[self.queue.popleft()] -= 1
            self.out.stale += 1
        pending = {v: n for v, n in self.pending.items() if n}
        queued = {v: n for v, n in self.queued.items() if n}
        if len(self.queue) < self.s.batch or self.budget.must_wait(pending, queued, self.version):
            return
        self.training = [self.queue.popleft() for _ in range(self.s.batch)]
        for version in self.training:
            self.queued[version] -= 1
        self._work(self.s.train_s, "trained")

    def _work(self, seconds: float, kind: str) -> None:
        """The trainer is busy; in turn, what is being generated stands still meanwhile."""
        self._schedule(seconds, kind, self.epoch)
        if self.s.in_turn:
            self.events = [(t + seconds if k == "done" else t, n, k, p) for t, n, k, p in self.events]
            heapq.heapify(self.events)
            for group in self.groups.values():
                group.begun += seconds

    def _on_trained(self, epoch: int) -> None:
        if epoch != self.epoch or self.training is None:
            return
        out = self.out
        out.training_s += self.s.train_s
        out.trained += len(self.training)
        out.staleness.update(self.version - v for v in self.training)
        out.steps += 1
        self.training = None
        self.version += 1
        if self.now - self.saved_at >= self.s.interval_s:
            self.blocked = True
            self._work(self.s.save_s, "saved")
        self._train()
        self._admit()

    def _on_saved(self, epoch: int) -> None:
        if epoch != self.epoch:
            return
        self.out.saves += 1
        self.out.saving_s += self.s.save_s
        self.blocked = False
        self.saved_at, self.saved_version = self.now, self.version
        self.saved_ages = Counter(self.out.staleness)
        self._train()
        self._admit()

    def _plan_failure(self, worker: int) -> None:
        if self.s.worker_devices and not math.isinf(self.s.mtbf_s):
            mean = self.s.mtbf_s / self.s.worker_devices
            self._schedule(float(self.random.exponential(mean)), "worker_failed", worker)

    def _plan_trainer_failure(self) -> None:
        if not math.isinf(self.s.mtbf_s):
            self._schedule(float(self.random.exponential(self.s.trainer_mtbf_s)), "trainer_failed")

    def _on_worker_failed(self, worker: int) -> None:
        out = self.out
        out.worker_failures += 1
        for number in sorted(self.held[worker]):
            group = self.groups[number]
            out.busy_places_s += self.now - group.begun
            group.worker = -1
            self.again.append(number)
            out.regenerated += 1
        self.held[worker].clear()
        self.up[worker] = False
        self._schedule(self.s.worker_restart_s, "worker_up", worker)
        self._admit()

    def _on_worker_up(self, worker: int) -> None:
        self.up[worker] = True
        heapq.heappush(self.free, (len(self.held[worker]), worker))
        self._plan_failure(worker)
        self._admit()

    def _on_trainer_failed(self, _: None) -> None:
        """Back to the last checkpoint: what was trained since, and everything under way, is done again."""
        out, s = self.out, self.s
        out.trainer_failures += 1
        lost = self.version - self.saved_version
        out.lost_steps += lost
        out.steps -= lost
        out.trained -= lost * s.batch
        out.staleness = Counter(self.saved_ages)
        out.rolled_back += lost * s.batch + len(self.groups) + len(self.queue) + len(self.training or ())
        for group in self.groups.values():
            if group.worker >= 0:
                out.busy_places_s += self.now - group.begun
        self.groups.clear()
        self.again.clear()
        self.queue.clear()
        self.pending.clear()
        self.queued.clear()
        self.training = None
        self.version = self.saved_version
        self.held = [set() for _ in range(s.workers)]
        self.free = []
        self.epoch += 1
        self.blocked = self.halted = True
        self._schedule(s.trainer_restart_s, "trainer_up", self.epoch)
        self._plan_trainer_failure()

    def _on_trainer_up(self, epoch: int) -> None:
        if epoch != self.epoch:
            return
        self.out.down_s += self.s.trainer_restart_s
        self.blocked = self.halted = False
        self.saved_at = self.now
        self.free = [(0, w) for w in range(self.s.workers) if self.up[w]]
        heapq.heapify(self.free)
        self._admit()


def simulate(scenario: Scenario) -> Outcome:
    """One run of the scenario."""
    return Simulation(scenario).run()
