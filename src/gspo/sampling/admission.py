"""Admission: how many groups the sampler starts now."""

from __future__ import annotations

import math
from collections.abc import Callable

from gspo.rollout.engine import RolloutEngine
from gspo.sampling.settings import SamplingSettings
from gspo.sampling.step_counts import SamplingCounts


class Admission:
    """Keeps the engine busy within the budget of the strategy. `last_judged`: groups kept and judged in the last step.

    `num_held()` is the number of groups that the engine can hold, where that changes during a run.
    """

    def __init__(
        self, settings: SamplingSettings, engine: RolloutEngine, num_held: Callable[[], int] | None = None
    ) -> None:
        self._settings, self._engine, self._num_held = settings, engine, num_held
        self.last_judged: tuple[int, int] = (0, 0)

    def room(
        self, report: SamplingCounts, num_in_flight: int, num_scoring: int, num_queued: int, num_training: int
    ) -> int:
        """How many groups to start, with so many in the engine, in the scorer, kept and waiting, and in training."""
        settings, num_pending = self._settings, num_in_flight + num_scoring
        if settings.strategy == "rounds":
            room = 0 if num_pending else settings.generation_batch
        elif settings.starts_surplus:
            room = min(self._room_in_engine(num_in_flight), self._num_needed(report, num_queued) - num_pending)
        else:
            num_outstanding = num_pending + num_queued + num_training
            room = min(self._room_in_engine(num_in_flight), settings.budget.room(num_outstanding))
        limit = settings.submission_limit
        return room if limit is None else min(room, limit - report.num_submitted)

    def _num_needed(self, report: SamplingCounts, num_queued: int) -> int:
        """Groups to generate for the rest of the batch, if the share kept is that of this step and the one before."""
        kept, judged = self.last_judged
        share = (kept + report.fates["kept"] + 1) / (judged + report.num_generated + 1)
        return math.ceil((self._settings.train_batch_size - num_queued) / share)

    def _room_in_engine(self, num_in_flight: int) -> int:
        """How many groups the engine should get: by free slots where it knows them, else by groups in flight.

        Counting groups would leave the slots of a group empty from each short answer until its longest one ends.
        """
        settings = self._settings
        if self._num_held is not None:
            return min(self._num_held(), settings.budget.capacity) - num_in_flight
        if settings.max_in_flight is None:
            wanted = self._engine.num_wanted(settings.concurrency * settings.n)
            if wanted is not None:
                return -(-wanted // settings.n)
        return settings.concurrency - num_in_flight
