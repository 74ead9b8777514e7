"""What is simulated, and what came of it."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from gspo.plan.constants import (
    MTBF_DEVICE_S,
    SLOW_FACTOR,
    SLOW_SHARE,
    STRAGGLER_SIGMA,
    TRAINER_RESTART_S,
    WORKER_RESTART_S,
)
from gspo.plan.lengths import Lengths
from gspo.plan.predict import Prediction
from gspo.plan.transfers import daly_interval
from gspo.plan.workload import Workload


@dataclass(frozen=True)
class Scenario:
    """A cluster at work. Times in seconds; a worker is one engine with `places` groups at once."""

    workers: int
    places: int
    batch: int
    group: int
    lengths: Lengths
    token_s: float  # a decode step of a full worker
    single_s: float  # of one with a single group; between the two in proportion
    train_s: float  # of a step, publication included
    save_s: float
    eta: int = 0
    in_flight: int | None = None  # groups generated at once; None = as the budget allows
    in_turn: bool = False  # generation stands still while the trainer works
    keep_rate: float = 1.0
    worker_devices: int = 1
    trainer_devices: int = 1
    mtbf_s: float = MTBF_DEVICE_S  # of one device
    worker_restart_s: float = WORKER_RESTART_S
    trainer_restart_s: float = TRAINER_RESTART_S
    sigma: float = STRAGGLER_SIGMA
    slow_share: float = SLOW_SHARE
    slow_factor: float = SLOW_FACTOR
    save_interval_s: float | None = None  # None: Daly's
    steps: int = 200
    seed: int = 0

    @property
    def trainer_mtbf_s(self) -> float:
        """Between two failures of any rank."""
        return self.mtbf_s / self.trainer_devices

    @property
    def interval_s(self) -> float:
        if self.save_interval_s is not None:
            return self.save_interval_s
        if math.isinf(self.mtbf_s):
            return math.inf
        return daly_interval(self.save_s, self.trainer_mtbf_s)


def scenario_of(prediction: Prediction, work: Workload, **changes: Any) -> Scenario:
    """The scenario of a predicted split. In one pool every device is a trainer's: any failure stops the run."""
    split = prediction.split
    train = sum(s for n, s in prediction.stages.items() if n not in ("gen", "staleness bound"))
    facts: dict[str, Any] = {
        "workers": split.engines,
        "places": max(1, math.ceil(prediction.rows / (work.group * work.alive))),
        "batch": work.prompts,
        "group": work.group,
        "lengths": work.lengths,
        "token_s": prediction.decode_step_s,
        "single_s": min(prediction.single_step_s, prediction.decode_step_s),
        "train_s": train,
        "save_s": prediction.checkpoint_s,
        "eta": prediction.eta or work.carry,
        "in_turn": not prediction.eta,
        "in_flight": None if prediction.eta else max(work.prompts, math.ceil(work.groups_at_once)),
        "keep_rate": work.keep_rate,
        "worker_devices": split.tp if split.separate else 0,
        "trainer_devices": split.trainers,
    }
    return Scenario(**{**facts, **changes})


@dataclass
class Outcome:
    """What a simulated run did. Counts of groups add up: `submitted` is the sum of where they ended."""

    steps: int = 0
    seconds: float = 0.0
    submitted: int = 0
    trained: int = 0
    filtered: int = 0
    stale: int = 0
    rolled_back: int = 0
    in_flight: int = 0
    queued: int = 0
    training: int = 0
    regenerated: int = 0  # times a group was begun again after its worker failed; not a group more
    worker_failures: int = 0
    trainer_failures: int = 0
    saves: int = 0
    lost_steps: int = 0
    training_s: float = 0.0
    saving_s: float = 0.0
    down_s: float = 0.0
    busy_places_s: float = 0.0
    places: int = 1
    staleness: Counter[int] = field(default_factory=Counter)

    @property
    def trainer_idle(self) -> float:
        """Share of the time in which the trainer waits for groups."""
        return max(0.0, 1 - (self.training_s + self.saving_s + self.down_s) / self.seconds)

    @property
    def rollout_idle(self) -> float:
        """Share of the workers' places without a group, failures included."""
        return max(0.0, 1 - self.busy_places_s / (self.places * self.seconds))

    @property
    def step_s(self) -> float:
        """Seconds a step that was kept, all losses included."""
        return self.seconds / max(1, self.steps)

    def to_dict(self) -> dict[str, Any]:
        names = (
            "steps seconds submitted trained filtered stale rolled_back in_flight queued training regenerated"
        )
        names += " worker_failures trainer_failures saves lost_steps step_s trainer_idle rollout_idle"
        ages = {str(age): count for age, count in sorted(self.staleness.items())}
        return {**{name: getattr(self, name) for name in names.split()}, "staleness": ages}
