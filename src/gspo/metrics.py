"""Numbers that carry their own reduction, so that they can be merged over micro-batches, ranks and steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Metric:
    """A number that carries its reduction, so that it can be merged over micro-batches, ranks and steps.

    `value` may be a 0-dim tensor on a device; nothing waits for it until `result()`.
    """

    kind: Literal["mean", "sum", "min", "max", "last"]
    value: float | Tensor  # for "mean": the weighted sum
    weight: float | Tensor = 1.0

    @staticmethod
    def mean(total: float | Tensor, count: float | Tensor = 1.0) -> Metric:
        """A mean given as its sum and its count."""
        return Metric("mean", total, count)

    def merge(self, other: Metric) -> Metric:
        assert self.kind == other.kind, f"cannot merge {self.kind} with {other.kind}"
        if self.kind == "mean":
            return Metric("mean", self.value + other.value, self.weight + other.weight)
        if self.kind == "sum":
            return Metric("sum", self.value + other.value)
        if self.kind == "last":
            return other
        if isinstance(self.value, float | int) or isinstance(other.value, float | int):
            pick: Callable = min if self.kind == "min" else max
            return Metric(self.kind, pick(float(self.value), float(other.value)))
        on_device = self.value.minimum if self.kind == "min" else self.value.maximum
        return Metric(self.kind, on_device(other.value))

    def result(self) -> float:
        value, weight = float(self.value), float(self.weight)
        if self.kind == "mean":
            return value / weight if weight else 0.0
        return value


Metrics = dict[str, Metric]


def merge_metrics(into: Metrics, new: Mapping[str, Metric]) -> Metrics:
    """Merge `new` into `into` in place, each metric by its own rule."""
    for name, metric in new.items():
        into[name] = into[name].merge(metric) if name in into else metric
    return into
