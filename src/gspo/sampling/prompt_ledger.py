"""What is known of each prompt from its past groups, and whether the next one is worth generating."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from gspo.seeding import derive_seed

_SEED_RANGE = float(1 << 63)  # derive_seed gives 63 bits


def mixed_probability(a: float, b: float, group_size: int) -> float:
    """P(neither all right nor all wrong) of `group_size` answers whose success rate is Beta(a, b).

    1 - B(a+G, b)/B(a, b) - B(a, b+G)/B(a, b), the two terms being the beta-binomial's ends.
    """
    all_right = math.exp(_log_rising(a, group_size) - _log_rising(a + b, group_size))
    all_wrong = math.exp(_log_rising(b, group_size) - _log_rising(a + b, group_size))
    return min(1.0, max(0.0, 1.0 - all_right - all_wrong))


def _log_rising(x: float, count: int) -> float:
    """log of x(x+1)…(x+count-1) = log Γ(x+count)/Γ(x)."""
    return math.lgamma(x + count) - math.lgamma(x)


class PromptLedger:
    """Discounted successes and failures per prompt, as a Beta posterior over a uniform prior.

    Old evidence fades by `discount` each time the prompt is seen, since the policy has moved on.
    """

    def __init__(self, *, group_size: int, seed: int, min_prob: float = 0.1, discount: float = 0.9) -> None:
        self._group_size = group_size
        self._seed = seed
        self._min_prob = min_prob
        self._discount = discount
        self._counts: dict[str, tuple[float, float]] = {}

    def observe(self, uid: str, num_right: int, num_wrong: int) -> None:
        """Add the outcome of one group."""
        right, wrong = self._counts.get(uid, (0.0, 0.0))
        self._counts[uid] = (self._discount * right + num_right, self._discount * wrong + num_wrong)

    def predict(self, uid: str) -> float | None:
        """P(mixed) of the prompt's next group; None for a prompt not seen yet."""
        counts = self._counts.get(uid)
        return None if counts is None else mixed_probability(1 + counts[0], 1 + counts[1], self._group_size)

    def submit_probability(self, uid: str) -> float:
        """q = clip(P(mixed) / 0.5, min_prob, 1): 1 for an unseen prompt."""
        mixed = self.predict(uid)
        return 1.0 if mixed is None else min(1.0, max(self._min_prob, mixed / 0.5))

    def admits(self, probability: float, draw: int) -> bool:
        """Whether the prompt drawn as number `draw` is submitted, with `probability`; a function of (seed, draw)."""
        return derive_seed(self._seed, "skip", draw) / _SEED_RANGE < probability

    def state_dict(self) -> dict[str, Any]:
        return {uid: list(counts) for uid, counts in self._counts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._counts = {uid: (float(right), float(wrong)) for uid, (right, wrong) in state.items()}
