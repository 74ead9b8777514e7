"""Preference pairs: from columns, and those that are made for `arithmetic`."""

from __future__ import annotations

import hashlib
import json
from collections import Counter

import pytest

from gspo.data.preferences import Preference, as_preferences
from gspo.data.rows import DataError, Row, user_message
from gspo.data.tasks.arithmetic import load_arithmetic, score


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
    forms = Counter((";" in pair.chosen, ";" in pair.rejected) for pair in pairs)
    assert len(forms) == 4 and min(forms.values()) >= 15  # worked out or direct, right or wrong


def test_a_wrong_sum_that_is_worked_out_slips_once_and_goes_on_from_there() -> None:
    for pair in as_preferences(load_arithmetic("train", limit=100)):
        *steps, last = pair.rejected.split(";")
        slips = 0
        for step in steps:
            asked, _, found = step.partition("=")
            slips += sum(map(int, asked.split("+"))) != int(found)
        assert not steps or (slips == 1 and steps[-1].endswith(f"={last}"))


def test_pairs_of_sums_are_drawn_by_all_terms_and_stay_the_same() -> None:
    pairs = [[pair.chosen, pair.rejected] for pair in as_preferences(load_arithmetic("train", limit=50))]
    assert hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:12] == "08e2700f76fc"
    same_start = [Row(f"r{i}", user_message(f"9+8+{i}="), "arithmetic") for i in range(1, 40)]
    assert len({";" in pair.rejected for pair in as_preferences(same_start)}) == 2


def test_a_row_of_sums_with_answers_of_its_own_keeps_them() -> None:
    own = Row("r", user_message("1+1="), "arithmetic", extra={"chosen": "2", "rejected": [{"content": "3"}], "n": 1})
    made = Row("r", user_message("1+1="), "arithmetic", extra={"num_terms": 2})
    assert as_preferences([own]) == [Preference("r", own.messages, "2", "3")]
    assert as_preferences([made])[0].chosen.endswith("2")
    with pytest.raises(DataError, match="field 'rejected' is missing"):
        as_preferences([Row("r", user_message("1+1="), "arithmetic", extra={"chosen": "2"})])
