"""Preference pairs: from columns, and those that are made for `arithmetic`."""

from __future__ import annotations

import pytest

from gspo.data.preferences import Preference, as_preferences
from gspo.data.rows import DataError, Row, user_message
from gspo.data.tasks.arithmetic import load_arithmetic, preference, score, work_out


def row(**extra: object) -> Row:
    return Row("file:1", user_message("q"), extra=extra)


def test_answers_are_texts_or_chats_that_end_with_them() -> None:
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "no"}]
    (pair,) = as_preferences([row(chosen="yes", rejected=chat)])
    assert pair == Preference("file:1", user_message("q"), "yes", "no")


@pytest.mark.parametrize(
    ("extra", "field"), [({"chosen": "a"}, "rejected"), ({"chosen": 1, "rejected": "b"}, "chosen")]
)
def test_a_row_without_two_answers_is_named(extra: dict[str, object], field: str) -> None:
    with pytest.raises(DataError, match=f"file:1: field '{field}'"):
        as_preferences([row(**extra)])


def test_pairs_of_sums_are_right_and_wrong_by_the_rule_and_stay_the_same() -> None:
    rows = load_arithmetic("train", limit=300)
    pairs = as_preferences(rows)
    assert pairs == as_preferences(rows)
    truths = [row.ground_truth for row in rows]
    assert all(score(pair.chosen, truth) == 1 for pair, truth in zip(pairs, truths))
    assert all(score(pair.rejected, truth) == 0 for pair, truth in zip(pairs, truths))
    direct = sum(";" not in pair.rejected for pair in pairs)
    assert 90 < direct < 150  # two in five


def test_a_wrong_step_is_carried_on() -> None:
    found = {preference("20+30+40=", draw)[1] for draw in range(200)}
    assert "20+30=51;51+40=91;91" in found and "20+30=50;50+40=91;91" in found  # a wrong addition
    assert "20+30=50;50+40=90;91" in found and "91" in found  # a wrong copy, a direct answer
    assert preference("20+30+40=", 0)[0] == work_out([20, 30, 40])
