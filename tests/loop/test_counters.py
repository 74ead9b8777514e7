"""The counts of a run, and that checkpoints keep them under names that do not change."""

from __future__ import annotations

import json

from gspo.loop.counters import Counters
from gspo.metrics import Metric


def tokens(generated: int, wasted: int) -> dict[str, Metric]:
    return {"train/generated_tokens": Metric("sum", generated), "train/wasted_tokens": Metric("sum", wasted)}


def test_tokens_add_up_over_steps():
    counters = Counters()
    counters.count_tokens(tokens(100, 10))
    totals = counters.count_tokens(tokens(50, 0))
    assert totals["train/total_generated_tokens"].result() == 150
    assert totals["train/total_wasted_tokens"].result() == 10


def test_bad_steps_count_in_a_row():
    counters = Counters()
    for bad, count in ((True, 1), (True, 2), (False, 0), (True, 1)):
        counters.count_step(bad=bad)
        assert counters.bad_steps_in_row == count


def test_the_form_in_a_checkpoint_does_not_change():
    counters = Counters(150, 10, 2.5, 1, 3)
    saved = json.loads(json.dumps(counters.state_dict()))
    assert saved == {
        "generated_tokens": 150,
        "wasted_tokens": 10,
        "seconds": 2.5,
        "bad_steps_in_row": 1,
        "rollbacks": 3,
    }
    again = Counters()
    again.load_state_dict(saved)
    assert again == counters
    older = Counters()
    older.load_state_dict({"generated_tokens": 7, "no_longer_counted": 1})
    assert older == Counters(generated_tokens=7)
