"""Charts of long runs: few points, with the extremes of every bucket and exact ends."""

from __future__ import annotations

import math
from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.report import thinning
from gspo.report.thinning import Thinning

NONE = math.nan


def test_a_short_run_is_shown_as_it_is() -> None:
    values = array("d", [1.0, NONE, 3.0])
    thin = Thinning(3)
    assert (thin.size, thin.at([4, 5, 6]), thin.extremes(values)) == (1, [4, 5, 6], [1.0, None, 3.0])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6) | st.just(NONE), min_size=1, max_size=400), st.integers(3, 30))
def test_every_bucket_keeps_its_extremes_and_its_last_value(values: list[float], most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(thinning, "MAX_POINTS", most)
        thin = Thinning(len(values))
    shown = thin.extremes(array("d", values))
    assert len(shown) == len(thin.rows) and list(thin.rows) == sorted(thin.rows)
    assert thin.at(range(len(values)))[0] == 0 and thin.at(range(len(values)))[-1] == len(values) - 1
    if thin.size == 1:
        return
    assert shown[0] == (None if math.isnan(values[0]) else values[0])
    for number, start in enumerate(range(1, len(values), thin.size)):
        bucket = [v for v in values[start : start + thin.size] if not math.isnan(v)]
        points = [p for p in shown[1 + 3 * number : 4 + 3 * number] if p is not None]
        if not bucket:
            assert points == []
            continue
        assert (min(points), max(points), points[-1]) == (min(bucket), max(bucket), bucket[-1])


def test_rows_that_are_added_change_the_last_bucket_only() -> None:
    values = array("d", (math.sin(i) for i in range(5000)))
    before, after = Thinning(4990), Thinning(5000)
    assert before.size == after.size == 8
    kept = 1 + 3 * ((4990 - 1) // 8)
    assert before.extremes(values[:4990])[:kept] == after.extremes(values)[:kept]
    assert len(after.rows) <= thinning.MAX_POINTS
