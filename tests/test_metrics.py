"""Metrics merge by their own rule, as numbers and as tensors."""

from __future__ import annotations

import pytest
import torch

from gspo.metrics import Metric, merge_metrics

RESULTS = [("mean", 4.0), ("sum", 16.0), ("min", 6.0), ("max", 10.0), ("last", 10.0)]


@pytest.mark.parametrize("make", [float, torch.tensor])
@pytest.mark.parametrize(("kind", "expected"), RESULTS)
def test_each_kind_merges_by_its_rule_and_a_mean_weighs_its_parts_by_their_counts(kind, expected, make):
    parts = [Metric(kind, make(6.0), 3.0), Metric(kind, make(10.0), 1.0)]
    assert parts[0].merge(parts[1]).result() == expected
    assert merge_metrics({"a": parts[0]}, {"a": parts[1], "b": parts[1]})["a"].result() == expected


def test_a_mean_of_nothing_is_0():
    assert Metric.mean(0.0, 0.0).merge(Metric.mean(0.0, 0.0)).result() == 0.0
    assert merge_metrics({}, {}) == {}


def test_what_is_merged_keeps_its_kind_and_goes_on_merging():
    """Three parts in turn, of numbers and tensors mixed; a part that was merged is not changed."""
    values = [(2.0, 1.0), (torch.tensor(8.0), torch.tensor(3.0)), (5.0, 2.0)]
    for kind, expected in (("mean", 15 / 6), ("sum", 15.0), ("min", 2.0), ("max", 8.0), ("last", 5.0)):
        parts = [Metric(kind, value, weight) for value, weight in values]
        into: dict[str, Metric] = {}
        for part in parts:
            assert merge_metrics(into, {"a": part}) is into
        assert into["a"].kind == kind and into["a"].result() == pytest.approx(expected)
        assert [float(part.value) for part in parts] == [2.0, 8.0, 5.0]
        backwards = parts[2].merge(parts[1]).merge(parts[0])
        assert backwards.result() == pytest.approx(2.0 if kind == "last" else expected)


def test_extremes_of_tensors_stay_on_their_device():
    for kind in ("min", "max"):
        merged = Metric(kind, torch.tensor(1.0)).merge(Metric(kind, torch.tensor(2.0)))
        assert isinstance(merged.value, torch.Tensor)


def test_a_weight_counts_in_a_mean_alone_and_kinds_do_not_mix():
    assert Metric("sum", 6.0, 3.0).result() == Metric("max", 6.0, 0.0).result() == 6.0
    assert Metric.mean(6.0).result() == 6.0 and Metric.mean(6.0, 4.0).result() == 1.5
    with pytest.raises(AssertionError, match="cannot merge sum with mean"):
        Metric("sum", 1.0).merge(Metric.mean(1.0))
