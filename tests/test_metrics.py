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
