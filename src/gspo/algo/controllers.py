"""The clip controller: moves the clip range slowly, within bounds, towards a target clip fraction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

RATE = 0.1  # largest relative change of the range in one step


@dataclass(slots=True)
class ClipController:
    """Multiplies ε by a factor in `bounds`. `target=None` leaves ε as configured."""

    target: float | None
    bounds: tuple[float, float] = (0.1, 10.0)
    factor: float = 1.0

    def observe(self, clip_fraction: float | None) -> None:
        """Widen after too much clipping, narrow after too little. Do not pass the first mini-batch of a step."""
        if self.target is None or clip_fraction is None:
            return
        error = max(-1.0, min(1.0, clip_fraction / self.target - 1.0))
        low, high = self.bounds
        self.factor = max(low, min(high, self.factor * (1.0 + RATE * error)))

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor = float(state["factor"])
