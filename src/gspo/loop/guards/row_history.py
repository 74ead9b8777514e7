"""The metric rows that alarms look back at: a bounded number of them, however long the run is."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

from gspo.runs.metric_names import held_out_accuracy

START_ROWS = 3  # the first training rows say what is normal for a run
RISING_STEPS = 10  # chance alone orders so many values about once in four million steps
REWARD = "critic/score_all/mean"

Row = Mapping[str, Any]


def finite_value(row: Row, name: str) -> float | None:
    """The value of a metric; None where it is missing or not finite."""
    value = row.get(name)
    return float(value) if value is not None and math.isfinite(value) else None


class RowHistory:
    """The rows so far that a rule can read.

    These are the first `START_ROWS + 1` and the latest row with each metric, the last `RISING_STEPS`, the row with the
    best held-out accuracy, and the first from there on with a reward.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Row] = {}  # by the number of rows before it
        self._length = 0
        self._counts: Counter[str] = Counter()  # rows with each metric
        self._first: set[int] = set()
        self._latest: dict[str, int] = {}
        self._best_accuracy = -math.inf
        self._best: set[int] = set()  # the best evaluation
        self._since_best: set[int] = set()  # the first reward from there on

    def rows(self) -> list[Row]:
        """The rows in order."""
        return list(self._kept.values())

    def add(self, row: Row) -> None:
        """Append a row, and forget those that no rule can read from now on."""
        number, self._length = self._length, self._length + 1
        self._kept[number] = row
        known = [name for name in row if name != "step" and finite_value(row, name) is not None]
        self._counts.update(known)
        self._latest |= dict.fromkeys(known, number)
        if any(self._counts[name] <= START_ROWS + 1 for name in known):
            self._first.add(number)
        accuracy = held_out_accuracy(row)
        if accuracy is not None and accuracy > self._best_accuracy:
            self._best_accuracy, self._best, self._since_best = accuracy, {number}, set()
        if not self._since_best and REWARD in known:
            self._since_best = {number}
        last = range(self._length - RISING_STEPS, self._length)
        needed = {*self._first, *self._latest.values(), *self._best, *self._since_best, *last}
        self._kept = {n: kept for n, kept in self._kept.items() if n in needed}
