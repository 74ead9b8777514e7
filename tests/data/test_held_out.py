"""A share of the questions is held out: exactly, by their text, and never on both sides."""

from __future__ import annotations

import pytest

from gspo.data.held_out import split_rows
from gspo.data.rows import DataError, Row, user_message

HELD_OUT = ["17", "25", "29", "35"]


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


@pytest.mark.parametrize(
    ("share", "number"), [(0.01, 1), (0.1, 1), (0.14, 1), (0.16, 2), (0.25, 2), (0.26, 3), (0.5, 5), (0.99, 10)]
)
def test_the_number_of_questions_is_rounded(share: float, number: int) -> None:
    assert len(split_rows(rows(*map(str, range(10))), share)[1]) == number


def test_which_questions_are_held_out_is_fixed() -> None:
    numbers = rows(*map(str, range(40)))
    assert texts(split_rows(numbers, 0.1)[1]) == HELD_OUT
    assert set(HELD_OUT) < set(texts(split_rows(numbers, 0.2)[1]))
    chat = [
        Row(f"c{i}", ({"role": "user", "content": "a"}, {"role": "assistant", "content": str(i)})) for i in range(9)
    ]
    assert len(split_rows(chat, 0.34)[1]) == 3  # every turn counts
