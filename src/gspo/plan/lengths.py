"""The lengths of responses: a log-normal distribution with a long tail, cut at the longest length allowed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import NormalDist

_NORMAL = NormalDist()
POINTS = 96


@dataclass(frozen=True)
class Lengths:
    """`mean` is taken after the cut at `longest`; `spread` is the standard deviation over the mean before the cut."""

    mean: float
    longest: int
    spread: float

    def __post_init__(self) -> None:
        if not 0 < self.mean <= self.longest:
            raise ValueError(f"mean response {self.mean:g} must be above 0 and at most the longest, {self.longest}")

    @property
    def constant(self) -> bool:
        """Whether all responses have the same length."""
        return self.spread == 0 or self.mean >= self.longest * 0.999

    @property
    def sigma(self) -> float:
        return math.sqrt(math.log1p(self.spread**2))

    @cached_property
    def _mu(self) -> float:
        """The location parameter for which the mean after the cut is `mean`, by bisection."""
        low, high = math.log(self.mean) - 3, math.log(self.longest) + 20
        for _ in range(80):
            middle = (low + high) / 2
            if self._cut_mean(middle) < self.mean:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    def _cut_mean(self, mu: float) -> float:
        z = (math.log(self.longest) - mu) / self.sigma
        below = math.exp(mu + self.sigma**2 / 2) * _NORMAL.cdf(z - self.sigma)
        return below + self.longest * (1 - _NORMAL.cdf(z))

    def survival(self, length: float) -> float:
        """Share of responses longer than this."""
        if length >= self.longest:
            return 0.0
        if self.constant:
            return 1.0 if length < self.mean else 0.0
        return 1.0 if length <= 0 else 1 - _NORMAL.cdf((math.log(length) - self._mu) / self.sigma)

    def quantile(self, share: float) -> float:
        """The length below which that share of responses lies."""
        if self.constant:
            return self.mean
        if share >= 1:
            return float(self.longest)
        return min(float(self.longest), math.exp(self._mu + self.sigma * _NORMAL.inv_cdf(max(share, 1e-12))))

    @cached_property
    def grid(self) -> Sequence[tuple[float, float]]:
        """(middle, width) of intervals that cover 0 to the longest, narrow where most responses end."""
        end = self.mean if self.constant else float(self.longest)
        edges = [end * (i / POINTS) ** 1.5 for i in range(POINTS + 1)]
        return [((a + b) / 2, b - a) for a, b in pairwise(edges)]

    def longest_of(self, count: float) -> float:
        """Expected length of the longest of `count` responses."""
        return sum(width * (1 - (1 - self.survival(x)) ** count) for x, width in self.grid)

    @cached_property
    def residual_mean(self) -> float:
        """Mean number of tokens left in a response observed at a random moment: E[L²] / 2E[L]."""
        return sum(width * x * self.survival(x) for x, width in self.grid) / self.mean

    @cached_property
    def residuals(self) -> Sequence[float]:
        """For the middle of each interval: share of responses observed at a random moment with more tokens than that left."""
        tail, out = 0.0, []
        for x, width in reversed(self.grid):
            here = width * self.survival(x)
            out.append((tail + here / 2) / self.mean)
            tail += here
        return [min(1.0, share) for share in reversed(out)]
