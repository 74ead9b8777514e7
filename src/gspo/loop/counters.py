"""Counts since the start of a run, across all interruptions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gspo.metrics import Metric, Metrics


@dataclass
class Counters:
    """The counts of one run. They are part of every checkpoint, under these names."""

    generated_tokens: int = 0
    wasted_tokens: int = 0
    seconds: float = 0.0
    bad_steps_in_row: int = 0  # steps at the end of the run in which updates were skipped
    rollbacks: int = 0

    def count_tokens(self, metrics: Metrics) -> Metrics:
        """Add what a step generated and wasted; the totals as metrics."""
        self.generated_tokens += int(metrics["train/generated_tokens"].result())
        self.wasted_tokens += int(metrics["train/wasted_tokens"].result())
        return {
            "train/total_generated_tokens": Metric("last", self.generated_tokens),
            "train/total_wasted_tokens": Metric("last", self.wasted_tokens),
        }

    def count_step(self, *, bad: bool) -> None:
        """Count consecutive steps whose updates were skipped; a good step resets the count."""
        self.bad_steps_in_row = self.bad_steps_in_row + 1 if bad else 0

    def state_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts of a checkpoint; a count that is not in it keeps its value."""
        for field in dataclasses.fields(self):
            setattr(self, field.name, state.get(field.name, getattr(self, field.name)))
