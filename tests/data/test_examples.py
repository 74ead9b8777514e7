"""Examples to imitate: what is trained on, what happens to long ones, and the order of steps."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.data.examples import Example, ExampleOrder, encode_examples
from gspo.data.rows import DataError, Row, user_message
from gspo.models.load import load_tokenizer
from gspo.types import Prompt


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer("embedded")


def row(answer: str | None, question: str = "x", uid: str = "r1") -> Row:
    return Row(uid, user_message(question), answer=answer)


def text(tokenizer: Any, example: Example) -> tuple[str, str]:
    return tokenizer.decode(example.prompt.token_ids), tokenizer.decode(example.answer_ids)


def test_an_example_is_the_prompt_and_the_answer_with_its_end(tokenizer: Any) -> None:
    (example,) = encode_examples([row("two", "1+1=")], tokenizer)
    assert text(tokenizer, example) == ("<user>1+1=<assistant>", "two<eos>")
    assert example.num_tokens == 6 + 4


def test_long_examples_are_an_error_that_names_the_row_and_the_remedies(tokenizer: Any) -> None:
    with pytest.raises(
        DataError, match=r"r1: field 'answer' is 14 tokens with its prompt; .*data\.max_length=9"
    ) as info:
        encode_examples([row("0123456789")], tokenizer, max_length=9)
    assert "data.filter_overlong_prompts=true, or data.truncation to left, right or middle" in str(info.value)


def test_long_examples_are_left_out(tokenizer: Any) -> None:
    rows = [row("0123456789"), row("ok", uid="r2")]
    kept = encode_examples(rows, tokenizer, max_length=9, filter_overlong=True)
    assert [e.prompt.uid for e in kept] == ["r2"]
    with pytest.raises(DataError, match=r"data\.filter_overlong_prompts: left no example: all 1 .*data\.max_length=9"):
        encode_examples(rows[:1], tokenizer, max_length=9, filter_overlong=True)


@pytest.mark.parametrize(
    ("truncation", "expected"),
    [
        ("right", ("<user>abc<assistant>", "0123")),
        ("left", ("c<assistant>", "012345<eos>")),
        ("middle", ("<user>abc", "2345<eos>")),  # 4 tokens of the beginning, 5 of the end
    ],
)
def test_long_examples_are_cut(tokenizer: Any, truncation: Any, expected: tuple[str, str]) -> None:
    (example,) = encode_examples([row("012345", "abc")], tokenizer, max_length=9, truncation=truncation)
    assert text(tokenizer, example) == expected
    assert example.num_tokens == 9


def test_a_cut_answer_without_its_prompt_begins_after_its_first_token(tokenizer: Any) -> None:
    (example,) = encode_examples([row("012345678")], tokenizer, max_length=4, truncation="left")
    assert text(tokenizer, example) == ("6", "78<eos>")


def test_a_cut_example_without_an_answer_is_left_out(tokenizer: Any) -> None:
    rows = [row("yes", "a long question"), row("yes", "b", uid="r2")]
    assert [e.prompt.uid for e in encode_examples(rows, tokenizer, max_length=8, truncation="right")] == ["r2"]
    with pytest.raises(DataError, match=r"data\.truncation: left no example"):
        encode_examples(rows[:1], tokenizer, max_length=8, truncation="right")


def test_a_row_without_an_answer_is_named(tokenizer: Any) -> None:
    with pytest.raises(DataError, match="r1: field 'answer' is missing"):
        encode_examples([row(None)], tokenizer)


def examples(num: int) -> list[Example]:
    return [Example(Prompt(str(i), (), (1,)), (2,)) for i in range(num)]


def uids(order: ExampleOrder, steps: range) -> list[str]:
    return [e.prompt.uid for step in steps for e in order.batch(step)]


def test_every_epoch_has_each_example_once_in_another_order() -> None:
    order = ExampleOrder(examples(10), 5, seed=0)
    epochs = [uids(order, range(2 * i, 2 * i + 2)) for i in range(3)]
    assert all(sorted(epoch, key=int) == [str(i) for i in range(10)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_step_has_the_same_examples_whenever_it_is_asked_for() -> None:
    forward, again = ExampleOrder(examples(7), 4, seed=3), ExampleOrder(examples(7), 4, seed=3)
    straight = [uids(forward, range(step, step + 1)) for step in range(9)]
    assert [uids(again, range(step, step + 1)) for step in reversed(range(9))] == straight[::-1]
    assert uids(ExampleOrder(examples(7), 4, seed=4), range(9)) != [u for step in straight for u in step]
    assert uids(ExampleOrder(examples(3), 2, seed=0, shuffle=False), range(3)) == ["0", "1", "2", "0", "1", "2"]


def test_no_examples_are_refused() -> None:
    with pytest.raises(DataError, match="has no examples"):
        ExampleOrder([], 4, seed=0)


def test_an_example_of_exactly_the_limit_is_whole_and_one_more_token_is_too_many(tokenizer: Any) -> None:
    rows = [row("12345"), row("123456", uid="r2")]  # 9 and 10 tokens
    assert [e.num_tokens for e in encode_examples(rows, tokenizer)] == [9, 10]
    kept = encode_examples(rows, tokenizer, max_length=9, filter_overlong=True)
    assert [e.prompt.uid for e in kept] == ["r1"]
    cut = encode_examples(rows, tokenizer, max_length=9, truncation="right")
    assert [text(tokenizer, e)[1] for e in cut] == ["12345<eos>", "123456"]
    with pytest.raises(DataError, match="r2: field 'answer' is 10 tokens"):
        encode_examples(rows, tokenizer, max_length=9)
    assert encode_examples([], tokenizer, max_length=9) == []


def test_options_of_the_chat_template_reach_every_prompt(tokenizer: Any) -> None:
    plain, closed = (
        encode_examples([row("a"), row("b")], tokenizer, **options)
        for options in ({}, {"add_generation_prompt": False})
    )
    assert [text(tokenizer, e)[0] for e in plain] == ["<user>x<assistant>"] * 2
    assert [text(tokenizer, e)[0] for e in closed] == ["<user>x"] * 2


def test_the_order_of_examples_is_frozen_in_every_epoch() -> None:
    """Steps of 3 of 8 examples: some steps have the end of an epoch and the beginning of the next."""
    wanted = ["6", "4", "1", "3", "5", "0", "7", "2", *("1", "7", "2", "3", "5", "6", "0", "4"), *("2", "0", "6", "4")]
    assert uids(ExampleOrder(examples(8), 3, seed=0), range(7))[:20] == wanted
    assert uids(ExampleOrder(examples(8), 8, seed=1), range(1)) == ["3", "5", "0", "7", "6", "4", "2", "1"]
    large = ExampleOrder(examples(2), 5, seed=0, shuffle=False)  # a step of more than two epochs
    assert [uids(large, range(i, i + 1)) for i in range(2)] == [["0", "1", "0", "1", "0"], ["1", "0", "1", "0", "1"]]
