"""Steps whose updates were skipped: who is told, and when the run stops."""

from __future__ import annotations

import pytest

from gspo.loop.guards.bad_numbers import BadNumbers, check_numbers, skipped_updates
from gspo.metrics import Metric


def metrics(**values: float) -> dict[str, Metric]:
    return {name.replace("__", "/"): Metric("sum", value) for name, value in values.items()}


def check(found: dict[str, Metric], bad_in_row: int, limit: int = 3) -> list[str]:
    said: list[str] = []
    check_numbers(7, found, bad_in_row, limit, said.append)
    return said


def test_a_step_is_bad_when_an_update_of_either_role_was_skipped():
    assert not skipped_updates({})
    assert not skipped_updates(metrics(actor__skipped_updates=0.0, critic__skipped_updates=0.0))
    assert skipped_updates(metrics(actor__skipped_updates=2.0))
    assert skipped_updates(metrics(actor__skipped_updates=0.0, critic__skipped_updates=1.0))


def test_the_run_stops_at_the_limit_of_bad_steps_in_a_row_and_not_before():
    bad = metrics(actor__nonfinite_gradient=1.0, actor__nonfinite_loss=1.0)
    assert check(bad, 0) == []
    assert check(bad, 2) == ["step 7: non-finite loss and gradient; those updates were skipped"]
    assert check(metrics(), 1) == ["step 7: non-finite critic loss; those updates were skipped"]
    with pytest.raises(BadNumbers, match=r"in 3 steps in a row"):
        check(bad, 3)
    with pytest.raises(BadNumbers, match=r"in 1 steps in a row"):
        check(bad, 1, limit=1)


@pytest.mark.parametrize("ratio", [100.1, float("inf"), float("nan")])
def test_a_ratio_that_exploded_stops_the_run(ratio):
    name = "actor/seq_importance_ratio/max"
    with pytest.raises(BadNumbers, match=r"step 7: sequence ratio .* exceeds 100"):
        check({name: Metric("max", ratio)}, 0)
    assert check({name: Metric("max", 100.0)}, 0) == []
