"""A share of the questions is held out: exactly, by their text, and never on both sides."""

from __future__ import annotations

import pytest

from gspo.data.held_out import split_rows
from gspo.data.rows import DataError, Row, user_message


def rows(*texts: str) -> list[Row]:
    return [Row(f"r{i}", user_message(text)) for i, text in enumerate(texts)]


def texts(part: list[Row]) -> list[str]:
    return [row.messages[-1]["content"] for row in part]


def test_a_share_of_the_questions_is_held_out_and_the_order_stays() -> None:
    numbers = [str(i) for i in range(200)]
    train, held_out = split_rows(rows(*numbers), 0.05)
    assert (len(train), len(held_out)) == (190, 10)
    assert sorted(texts(train) + texts(held_out), key=int) == numbers
    assert texts(train) == sorted(texts(train), key=int) and texts(held_out) == sorted(texts(held_out), key=int)
    assert texts(held_out) != numbers[:10] and texts(held_out) != numbers[-10:]


def test_equal_questions_are_on_one_side_whatever_their_place_and_system_prompt() -> None:
    numbers = [str(i) for i in range(40)]
    train, held_out = split_rows(rows(*numbers, *reversed(numbers)), 0.25)
    assert not set(texts(train)) & set(texts(held_out))
    assert len(set(texts(held_out))) == 10 and len(held_out) == 20
    system = {"role": "system", "content": "Think."}
    prompted = [Row(f"p{i}", (system, *user_message(n))) for i, n in enumerate(numbers)]
    assert texts(split_rows(prompted, 0.25)[1]) == texts(split_rows(rows(*numbers), 0.25)[1])


def test_at_least_one_question_is_held_out_and_one_is_left() -> None:
    train, held_out = split_rows(rows("a", "b", "c"), 0.01)
    assert (len(train), len(held_out)) == (2, 1)
    with pytest.raises(DataError, match=r"data\.val_split=0\.5: needs at least two different questions"):
        split_rows(rows("a", "a"), 0.5)
