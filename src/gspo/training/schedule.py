"""Learning rates as a function of the training step, without state."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Schedule:
    """Warm-up from 0, then constant, or a line or a cosine down to `min_ratio` of the peak at `total_steps`."""

    lr: float
    kind: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    min_ratio: float = 0.0

    def at(self, step: int) -> float:
        """The rate for training step `step`, counted from 0."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        if self.kind == "constant" or self.total_steps is None:
            return self.lr
        span = max(1, self.total_steps - self.warmup_steps)
        done = min(1.0, (step - self.warmup_steps) / span)
        left = 1 - done if self.kind == "linear" else 0.5 * (1 + math.cos(math.pi * done))
        return self.lr * (self.min_ratio + (1 - self.min_ratio) * left)
