"""What is simulated, and the outcome."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from gspo.plan import constants
from gspo.plan.lengths import Lengths
from gspo.plan.predict import Prediction
from gspo.plan.transfers import daly_interval
from gspo.plan.workload import Workload


@dataclass(frozen=True)
class Scenario:
    """A run on a cluster. Times are in seconds; a worker is one engine that generates `group_slots` groups at once."""

    workers: int
    group_slots: int
    batch: int
    group_size: int
    lengths: Lengths
    token_s: float  # a decode step of a full worker
    single_s: float  # a decode step with a single group; linear in between
    train_s: float  # per step, publication included
    save_s: float
    eta: int = 0
    in_flight: int | None = None  # groups generated at once; None: as many as the staleness budget allows
    sync: bool = False  # nothing is generated while the trainer works
    keep_rate: float = 1.0
    worker_devices: int = 1
    trainer_devices: int = 1
    mtbf_s: float = constants.MTBF_DEVICE_S  # of one device
    worker_restart_s: float = constants.WORKER_RESTART_S
    trainer_restart_s: float = constants.TRAINER_RESTART_S
    sigma: float = constants.STRAGGLER_SIGMA
    slow_share: float = constants.SLOW_SHARE
    slow_factor: float = constants.SLOW_FACTOR
    save_interval_s: float | None = None  # None: the best by Daly's formula
    steps: int = 200
    seed: int = 0

    @property
    def trainer_mtbf_s(self) -> float:
        """Mean time between failures of any rank."""
        return self.mtbf_s / self.trainer_devices

    @property
    def interval_s(self) -> float:
        if self.save_interval_s is not None:
            return self.save_interval_s
        if math.isinf(self.mtbf_s):
            return math.inf
        return daly_interval(self.save_s, self.trainer_mtbf_s)


def scenario_of(prediction: Prediction, work: Workload, **changes: Any) -> Scenario:
    """The scenario of a predicted split. In one pool every device trains, so any failure stops the run."""
    split = prediction.split
    train = sum(s for n, s in prediction.stages.items() if n not in ("gen", "staleness bound"))
    facts: dict[str, Any] = {
        "workers": split.engines,
        "group_slots": max(1, math.ceil(prediction.rollout.rows / (work.group_size * work.running_share))),
        "batch": work.prompts,
        "group_size": work.group_size,
        "lengths": work.lengths,
        "token_s": prediction.rollout.step_s,
        "single_s": min(prediction.rollout.single_s, prediction.rollout.step_s),
        "train_s": train,
        "save_s": prediction.checkpoint_s,
        "eta": prediction.eta or work.max_staleness,
        "sync": not prediction.eta,
        "in_flight": None if prediction.eta else max(work.prompts, math.ceil(work.groups_at_once)),
        "keep_rate": work.keep_rate,
        "worker_devices": split.tp if split.separate else 0,
        "trainer_devices": split.trainers,
    }
    return Scenario(**{**facts, **changes})


@dataclass
class Outcome:
    """What a simulated run did. `submitted` is the sum of the groups in all states from `trained` to `training`."""

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
    regenerated: int = 0  # restarts of groups whose worker failed; they count once in `submitted`
    worker_failures: int = 0
    trainer_failures: int = 0
    saves: int = 0
    lost_steps: int = 0
    training_s: float = 0.0
    saving_s: float = 0.0
    down_s: float = 0.0
    busy_slots_s: float = 0.0
    group_slots: int = 1
    staleness: Counter[int] = field(default_factory=Counter)

    @property
    def trainer_idle(self) -> float:
        """Share of the time that the trainer waits for groups."""
        return max(0.0, 1 - (self.training_s + self.saving_s + self.down_s) / self.seconds)

    @property
    def rollout_idle(self) -> float:
        """Share of the group slots that are empty, failures included."""
        return max(0.0, 1 - self.busy_slots_s / (self.group_slots * self.seconds))

    @property
    def step_s(self) -> float:
        """Seconds per step that was kept, with all time lost."""
        return self.seconds / max(1, self.steps)

    def to_dict(self) -> dict[str, Any]:
        names = "steps seconds submitted trained filtered stale rolled_back in_flight queued training regenerated"
        names += " worker_failures trainer_failures saves lost_steps step_s trainer_idle rollout_idle"
        ages = {str(age): count for age, count in sorted(self.staleness.items())}
        return {**{name: getattr(self, name) for name in names.split()}, "staleness": ages}
