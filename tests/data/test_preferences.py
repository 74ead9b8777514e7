"""Preference pairs: from columns, and those that are made for `arithmetic`."""

from __future__ import annotations

import pytest

from gspo.data.preferences import Preference, as_preferences
from gspo.data.rows import DataError, Row, user_message
from gspo.data.tasks.arithmetic import load_arithmetic, score, work_out


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
    assert all(pair.chosen == work_out(terms(row)) and pair.rejected.isdigit() for pair, row in zip(pairs, rows))
    assert len({int(pair.rejected) - int(truth) for pair, truth in zip(pairs, truths)}) == 5  # several slips


def terms(row: Row) -> list[int]:
    return [int(term) for term in row.messages[0]["content"].rstrip("=").split("+")]
