"""Fewer points for a chart of a long run: of each bucket of rows the smallest, the largest and the last value."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

MAX_POINTS = 3000
PER_BUCKET = 3


class Thinning:
    """Which of `num_rows` rows a chart shows. Up to MAX_POINTS rows: all of them, unchanged.

    The first row is a bucket of its own, so both ends of a chart are exact. Every other bucket has `size` rows, a power
    of 2, and gives three points at its first, middle and last row: the smallest and largest value in the order in which
    they occur, then the last value. So rows that are appended to a run change the last bucket only.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows, self.size = num_rows, 1
        while num_rows > MAX_POINTS and PER_BUCKET * num_rows > MAX_POINTS * self.size:
            self.size *= 2
        starts = np.arange(1, num_rows, self.size)
        ends = np.minimum(starts + self.size, num_rows) - 1
        self._ends = ends
        if self.size == 1:
            self.rows = np.arange(num_rows)
        else:
            points = np.stack([starts, (starts + ends) // 2, ends], axis=1).ravel()
            self.rows = np.concatenate([[0], points])

    def at(self, values: Sequence[float]) -> list[float]:
        """The values at the rows of the points, for an axis."""
        return np.asarray(values)[self.rows].tolist()

    def extremes(self, values: Sequence[float]) -> list[float | None]:
        """A metric, one value per point; NaN is no value. A point without a value, or that repeats the last, is None."""
        column = np.frombuffer(values) if isinstance(values, array) else np.asarray(values, dtype=float)
        if self.size > 1:
            column = self._thinned(column)
        return [None if value != value else value for value in column.tolist()]

    def _thinned(self, column: np.ndarray) -> np.ndarray:
        missing = np.full(len(self._ends) * self.size - (self.num_rows - 1), np.nan)
        buckets = np.concatenate([column[1:], missing]).reshape(-1, self.size)
        known, every = ~np.isnan(buckets), np.arange(len(buckets))
        last = self.size - 1 - known[:, ::-1].argmax(axis=1)
        low = np.where(known, buckets, np.inf).argmin(axis=1)
        high = np.where(known, buckets, -np.inf).argmax(axis=1)
        first, second = np.minimum(low, high), np.maximum(low, high)
        points = np.stack([buckets[every, i] for i in (first, second, last)], axis=1)
        points[:, 0][first == last] = np.nan
        points[:, 1][(second == last) | (second == first)] = np.nan
        return np.concatenate([column[:1], points.ravel()])
