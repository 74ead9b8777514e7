"""Checkpoint intervals: Daly's against the optimum found by trying."""

from __future__ import annotations

import math

import pytest

from gspo.plan.transfers import daly_interval, useful_share, young_interval


@pytest.mark.parametrize(("save", "mtbf"), [(10.0, 1e5), (60.0, 4e4), (300.0, 4e4), (300.0, 5e3)])
def test_no_other_interval_keeps_more_work(save, mtbf):
    best = daly_interval(save, mtbf)
    kept = useful_share(best, save, 300.0, mtbf)
    tried = [useful_share(best * 1.05**i, save, 300.0, mtbf) for i in range(-60, 61)]
    assert kept == pytest.approx(max(tried), rel=2e-4)


def test_the_numbers_by_hand():
    assert young_interval(50.0, 10_000.0) == 1000.0
    x = math.sqrt(50 / 20_000)
    assert daly_interval(50.0, 10_000.0) == pytest.approx(1000 * (1 + x / 3 + x * x / 9) - 50)
    assert daly_interval(100.0, 40.0) == 40.0  # a save takes longer than two failures are apart


def test_without_failures_only_the_saves_cost():
    assert useful_share(1e9, 1.0, 1.0, 1.0) == 0.0
