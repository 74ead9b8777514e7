"""A run on thousands of devices, simulated event by event: stragglers, failures, checkpoints, bounded staleness.

    submitted ──▶ worker ──▶ queue ──▶ trainer ──▶ trained
        ▲           │  │       │           │
        └───────────┘  │       └─ stale    └─ rolled back with everything else when a rank fails
       worker failed   └─ filtered

The trainer takes the oldest batch under the staleness budget of a real run, and waits while a group in flight must come
first. Groups of a failed worker are generated again by others. When a rank fails, the run returns to its last
checkpoint. Every group ends in exactly one state, and a seed determines the run.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from gspo.plan.scenario import Outcome, Scenario
from gspo.sampling.staleness import StalenessBudget

DRAWS = 4096  # random numbers drawn at once
MAX_EVENTS = 20_000_000


class SimulationError(RuntimeError):
    """A run that makes no progress. The message says how often it fails."""


@dataclass(slots=True)
class _Group:
    version: int
    worker: int = -1  # -1: its worker failed
    started: float = 0.0
    attempt: int = 0


class Simulation:
    """The state of a simulated run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.random = np.random.default_rng(scenario.seed)
        self.budget = StalenessBudget(scenario.batch, scenario.eta)
        self.now, self.version, self.event_number, self.epoch = 0.0, 0, 0, 0
        self.events: list[tuple[float, int, str, Any]] = []
        self.groups_of: list[set[int]] = [set() for _ in range(scenario.workers)]
        self.is_up = [True] * scenario.workers
        # A heap of (number of groups, worker); entries with another number of groups are out of date.
        self.free: list[tuple[int, int]] = [(0, w) for w in range(scenario.workers)]
        self.groups: dict[int, _Group] = {}  # in flight, by number
        self.lost: deque[int] = deque()  # groups whose worker failed
        self.pending: Counter[int] = Counter()  # groups in flight by version
        self.queue: deque[int] = deque()  # versions of groups that wait for the trainer, oldest first
        self.queued: Counter[int] = Counter()  # the same, counted by version
        self.training: list[int] | None = None  # versions of the batch in training
        self.blocked = False  # the trainer saves a checkpoint or is down
        self.halted = False  # the trainer is down
        self.phase_began = 0.0  # when the trainer last began to train, to save or to be down
        self.pause_ends = 0.0  # until then nothing is generated, in a synchronous run
        self.saved_at, self.saved_version = 0.0, 0
        self.saved_ages: Counter[int] = Counter()
        self.out = Outcome(group_slots=scenario.workers * scenario.group_slots)
        self._draws: deque[tuple[float, float]] = deque()
        self.speed = self._speeds()
        grid = np.linspace(0.0, 1.0, 2049)
        self._grid, self._table = grid, np.array([scenario.lengths.quantile(float(q)) for q in grid])

    def _speeds(self) -> np.ndarray:
        s = self.scenario
        spread = np.exp(self.random.normal(0.0, s.sigma, s.workers)) if s.sigma > 0 else np.ones(s.workers)
        slow = self.random.random(s.workers) < s.slow_share
        return np.where(slow, spread * s.slow_factor, spread)

    def run(self) -> Outcome:
        """Simulate until `scenario.steps` steps are trained and kept."""
        s = self.scenario
        for worker in range(s.workers):
            self._schedule_failure("worker_failed", s.worker_devices, worker)
        self._schedule_failure("trainer_failed", s.trainer_devices)
        self._start_groups()
        for _ in range(MAX_EVENTS):
            if self.out.steps >= s.steps:
                return self._close()
            time, _, kind, payload = heapq.heappop(self.events)
            self.now = time
            getattr(self, f"_on_{kind}")(payload)
        raise SimulationError(
            f"the simulated run did not reach {s.steps} steps in {MAX_EVENTS:,} events: it makes no progress because a "
            f"trainer rank fails every {s.trainer_mtbf_s:,.0f} s and a step takes {s.train_s:,.0f} s of training"
        )

    def _close(self) -> Outcome:
        out = self.out
        out.seconds = self.now
        out.in_flight, out.queued, out.training = len(self.groups), len(self.queue), len(self.training or ())
        self._count_busy(self.groups.values())
        return out

    def _count_busy(self, groups: Iterable[_Group]) -> None:
        """Add the time that these groups have held a slot, without pauses: their start is moved by whole ones."""
        until = max(self.now, self.pause_ends)
        for group in groups:
            if group.worker >= 0:
                self.out.busy_slots_s += until - group.started

    def _schedule(self, delay: float, kind: str, payload: Any = None) -> None:
        self.event_number += 1
        heapq.heappush(self.events, (self.now + delay, self.event_number, kind, payload))

    def _start_groups(self) -> None:
        """Start groups while the staleness budget and the workers have room, lost ones first."""
        if self.halted or (self.scenario.sync and (self.blocked or self.training is not None)):
            return
        waiting = self.training or ()
        while self.free:
            room = self.budget.room(len(self.groups) + len(self.queue) + len(waiting))
            if self.scenario.in_flight is not None:
                room = min(room, self.scenario.in_flight - len(self.groups))
            if not self.lost and room <= 0:
                return
            worker = self._choose_worker()
            if worker is None:
                return
            if self.lost:
                number = self.lost.popleft()
            else:
                number = self.out.submitted
                self.out.submitted += 1
                self.groups[number] = _Group(self.version)
                self.pending[self.version] += 1
            self._start(number, worker)

    def _offer(self, worker: int) -> None:
        heapq.heappush(self.free, (len(self.groups_of[worker]), worker))

    def _choose_worker(self) -> int | None:
        """The worker with the fewest groups that has a free slot."""
        while self.free:
            load, worker = heapq.heappop(self.free)
            if self.is_up[worker] and load == len(self.groups_of[worker]) and load < self.scenario.group_slots:
                return worker
        return None

    def _start(self, number: int, worker: int) -> None:
        group = self.groups[number]
        group.worker, group.started, group.attempt = worker, self.now, group.attempt + 1
        self.groups_of[worker].add(number)
        self._offer(worker)
        length, _ = self._draw()
        seconds = length * self._token_s(len(self.groups_of[worker])) * float(self.speed[worker])
        self._schedule(seconds, "done", (number, group.attempt))

    def _token_s(self, load: int) -> float:
        s = self.scenario
        share = (load - 1) / (s.group_slots - 1) if s.group_slots > 1 else 1.0
        return s.single_s + share * (s.token_s - s.single_s)

    def _draw(self) -> tuple[float, float]:
        """The longest response of a group, and a uniform number that decides whether it is kept."""
        if not self._draws:
            longest = np.interp(self.random.random(DRAWS) ** (1 / self.scenario.group_size), self._grid, self._table)
            self._draws.extend(zip(longest.tolist(), self.random.random(DRAWS).tolist()))
        return self._draws.popleft()

    def _on_done(self, payload: tuple[int, int]) -> None:
        number, attempt = payload
        group = self.groups.get(number)
        if group is None or group.worker < 0 or group.attempt != attempt:
            return  # its worker failed since, or the run returned to a checkpoint
        self._count_busy([self.groups.pop(number)])
        self.groups_of[group.worker].discard(number)
        self._offer(group.worker)
        self.pending[group.version] -= 1
        if self._draw()[1] < self.scenario.keep_rate:
            bisect.insort(self.queue, group.version)
            self.queued[group.version] += 1
        else:
            self.out.filtered += 1
        self._train()
        self._start_groups()

    def _train(self) -> None:
        """Start training on the oldest batch, unless that could make a group in flight too old."""
        if self.blocked or self.training is not None:
            return
        while self.queue and self.budget.is_stale(self.queue[0], self.version):
            self.queued[self.queue.popleft()] -= 1
            self.out.stale += 1
        if len(self.queue) < self.scenario.batch:
            return
        if self.budget.must_wait(+self.pending, +self.queued, self.version):  # + leaves out versions without groups
            return
        self.training = [self.queue.popleft() for _ in range(self.scenario.batch)]
        for version in self.training:
            self.queued[version] -= 1
        self._occupy(self.scenario.train_s, "trained")

    def _occupy(self, seconds: float, kind: str) -> None:
        """Keep the trainer busy; in a synchronous run generation stops meanwhile."""
        self._schedule(seconds, kind, self.epoch)
        self.phase_began = self.now
        if self.scenario.sync:
            self.pause_ends = self.now + seconds
            self.events = [(t + seconds if k == "done" else t, n, k, p) for t, n, k, p in self.events]
            heapq.heapify(self.events)
            for group in self.groups.values():
                group.started += seconds

    def _on_trained(self, epoch: int) -> None:
        if epoch != self.epoch or self.training is None:
            return
        out = self.out
        out.training_s += self.scenario.train_s
        out.trained += len(self.training)
        out.staleness.update(self.version - v for v in self.training)
        out.steps += 1
        self.training = None
        self.version += 1
        if self.now - self.saved_at >= self.scenario.interval_s:
            self.blocked = True
            self._occupy(self.scenario.save_s, "saved")
        self._train()
        self._start_groups()

    def _on_saved(self, epoch: int) -> None:
        if epoch != self.epoch:
            return
        self.out.saves += 1
        self.out.saving_s += self.scenario.save_s
        self.blocked = False
        self.saved_at, self.saved_version = self.now, self.version
        self.saved_ages = Counter(self.out.staleness)
        self._train()
        self._start_groups()

    def _schedule_failure(self, kind: str, num_devices: int, worker: int | None = None) -> None:
        """Draw when the next of `num_devices` devices fails."""
        if num_devices and not math.isinf(self.scenario.mtbf_s):
            self._schedule(float(self.random.exponential(self.scenario.mtbf_s / num_devices)), kind, worker)

    def _on_worker_failed(self, worker: int) -> None:
        out = self.out
        out.worker_failures += 1
        numbers = sorted(self.groups_of[worker])
        self._count_busy(self.groups[number] for number in numbers)
        for number in numbers:
            self.groups[number].worker = -1
        self.lost += numbers
        out.regenerated += len(numbers)
        self.groups_of[worker].clear()
        self.is_up[worker] = False
        self._schedule(self.scenario.worker_restart_s, "worker_up", worker)
        self._start_groups()

    def _on_worker_up(self, worker: int) -> None:
        self.is_up[worker] = True
        self._offer(worker)
        self._schedule_failure("worker_failed", self.scenario.worker_devices, worker)
        self._start_groups()

    def _on_trainer_failed(self, _: None) -> None:
        """Return to the last checkpoint: steps since then and all groups in flight are lost."""
        out, s = self.out, self.scenario
        out.trainer_failures += 1
        lost = self.version - self.saved_version
        out.lost_steps += lost
        out.steps -= lost
        out.trained -= lost * s.batch
        out.staleness = Counter(self.saved_ages)
        out.rolled_back += lost * s.batch + len(self.groups) + len(self.queue) + len(self.training or ())
        self._count_busy(self.groups.values())
        self._count_interrupted()
        for forgotten in (self.groups, self.lost, self.queue, self.pending, self.queued):
            forgotten.clear()
        self.training = None
        self.version = self.saved_version
        self.groups_of = [set() for _ in range(s.workers)]
        self.free = []
        self.epoch += 1
        self.blocked = self.halted = True
        self.phase_began = self.pause_ends = self.now
        self._schedule(s.trainer_restart_s, "trainer_up", self.epoch)
        self._schedule_failure("trainer_failed", s.trainer_devices)

    def _count_interrupted(self) -> None:
        """Add the time of what a failure interrupts: a step, a checkpoint, or the restart after another failure."""
        spent, out = self.now - self.phase_began, self.out
        if self.halted:
            out.down_s += spent
        elif self.training is not None:
            out.training_s += spent
        elif self.blocked:
            out.saving_s += spent

    def _on_trainer_up(self, epoch: int) -> None:
        if epoch != self.epoch:
            return
        self.out.down_s += self.scenario.trainer_restart_s
        self.blocked = self.halted = False
        self.saved_at = self.now
        self.free = [(0, w) for w in range(self.scenario.workers) if self.is_up[w]]
        heapq.heapify(self.free)
        self._start_groups()


def simulate(scenario: Scenario) -> Outcome:
    """The outcome of one simulated run."""
    return Simulation(scenario).run()
