"""Records to rows, field by field: which column is the question, the truth and the text to imitate, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.data.columns import Columns, as_rows, to_row
from gspo.data.messages import read_messages, show, split_reply
from gspo.data.rows import DataError, Row, user_message
from gspo.data.usual_columns import ABSENT, find_columns, get


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def read(record: dict[str, Any], columns: Columns | None = None) -> Row:
    (row,) = as_rows([record], "d", columns)
    return row


@pytest.mark.parametrize(
    ("record", "columns", "row"),
    [
        (
            {"prompt": "q", "ground_truth": 1, "answer": "a", "reward_model": {"style": "x"}, "level": 2},
            None,
            Row("d:1", user_message("q"), "unknown", 1, "a", {"ground_truth": 1, "answer": "a", "level": 2}),
        ),
        (
            {"prompt": "q", "reward_model": {"ground_truth": 0}, "ground_truth": 1, "data_source": "s"},
            None,
            Row("d:1", user_message("q"), "s", 0, None, {"ground_truth": 1}),
        ),
        (
            {"prompt": "q", "reward_model": {"ground_truth": None}, "ground_truth": None, "answer": "7"},
            None,
            Row("d:1", user_message("q"), "unknown", "7", "7", {"ground_truth": None, "answer": "7"}),
        ),
        (
            {"q": {"text": "x"}, "s": "math", "t": "5", "extra_info": {"t": 6, "n": None}},
            Columns("q.text", "t", "s"),
            Row("d:1", user_message("x"), "math", "5", None, {"t": 6, "n": None}),
        ),
        (
            {"prompt": "q", "ground_truth": 1, "level": 2, "extra_info": {"index": 3, "level": 4}},
            None,
            Row("d:1", user_message("q"), "unknown", 1, None, {"ground_truth": 1, "level": 4, "index": 3}),
        ),
        (
            {"prompt": "q", "mine": "5", "answer": "no", "out": "text"},
            Columns(ground_truth_key="mine", answer_key="out"),
            Row("d:1", user_message("q"), "unknown", "5", "text", {"mine": "5", "answer": "no", "out": "text"}),
        ),
        (
            {"prompt": "q", "answer": "no"},
            Columns(ground_truth_key="mine"),
            Row("d:1", user_message("q"), "unknown", "no", "no", {"answer": "no"}),
        ),
        (
            {"prompt": [user("q"), said("r")], "extra_info": {"answer": "other"}},
            None,
            Row("d:1", user_message("q"), "unknown", "r", "r", {"answer": "other"}),
        ),
        (
            {"prompt": [user("q"), said("r")], "solution": "s"},
            Columns(answer_key="solution"),
            Row("d:1", user_message("q"), "unknown", "s", "s", {"solution": "s"}),
        ),
        (
            {"prompt": "q", "ground_truth": 3, "completion": [said("c")], "response": 4, "output": "o"},
            None,
            Row(
                "d:1", user_message("q"), "unknown", 3, "c",
                {"ground_truth": 3, "completion": [said("c")], "response": 4, "output": "o"},
            ),
        ),
        ({"prompt": "q", "answer": "x"}, Columns(ground_truth_key=None), Row("d:1", user_message("q"), "unknown", None, "x", {"answer": "x"})),
    ],
)  # fmt: skip
def test_a_record_as_a_row(record: dict[str, Any], columns: Columns | None, row: Row) -> None:
    assert read(record, columns) == row


@pytest.mark.parametrize(
    ("record", "field", "problem"),
    [
        ({"prompt": "q", "ground_truth": 1, "extra_info": 3}, "extra_info", "is 3; expected an object"),
        ({"prompt": "q", "ground_truth": float("nan")}, "ground_truth", "is nan; expected a finite number"),
        ({"prompt": "q", "answer": float("inf")}, "answer", "is inf; expected a finite number"),
        ({"prompt": "q", "reward_model": "x", "ground_truth": 1}, "reward_model", 'is "x"; expected an object'),
        ({"prompt": "q", "ground_truth": 1, "data_source": 4}, "data_source", "is 4; expected the name of a task"),
        ({"prompt": "q", "ground_truth": 1, "data_source": ""}, "data_source", 'is ""; expected the name of a task'),
        ({"prompt": "q", "level": 1}, "reward_model.ground_truth", "The row has prompt, level; name its column"),
        ({"prompt": None}, "prompt", "is missing; expected chat messages or a text. The row has prompt;"),
        ({}, "prompt", "The row has no fields;"),
        ({"prompt": " \n"}, "prompt", "is an empty text"),
        ({"prompt": []}, "prompt", "is []; expected chat messages or a text"),
        ({"prompt": 3}, "prompt", "is 3; expected chat messages or a text"),
        ({"prompt": "a\ud800"}, "prompt", "which is not a character"),
        ({"prompt": [user("a"), 3]}, "prompt[1]", "is 3; expected an object with role and content"),
        ({"prompt": [{"role": "user"}]}, "prompt[0].content", "is missing; expected a text"),
        ({"prompt": [{"role": "user", "content": 3}]}, "prompt[0].content", "is 3; expected a text"),
        ({"prompt": [{"content": "x"}]}, "prompt[0].role", "is missing; expected a text"),
        ({"prompt": [{"role": "robot", "content": "x"}]}, "prompt[0].role", 'is "robot"; expected one of system,'),
        ({"prompt": [user("a"), said("b\ud800")]}, "prompt[1].content", "which is not a character"),
        ({"prompt": [said("a")]}, "prompt[-1].role", "is assistant; expected a message that needs an answer"),
        ({"prompt": [user("a"), said("b"), said("c")]}, "prompt[-1].role", "is assistant; expected a message"),
    ],
)
def test_a_record_that_cannot_be_used_is_named_by_its_field(record: dict[str, Any], field: str, problem: str) -> None:
    with pytest.raises(DataError) as caught:
        read(record)
    assert (caught.value.where, caught.value.field) == ("d:1", field) and problem in str(caught.value)


def test_a_text_to_imitate_that_was_named_must_be_a_text() -> None:
    for record, problem in (({}, "is missing; expected a text"), ({"out": 3}, "is 3; expected a text")):
        with pytest.raises(DataError, match=f"field 'out' {problem}"):
            read({"prompt": "q", "ground_truth": 1, **record}, Columns(answer_key="out"))
    assert read({"prompt": "q", "ground_truth": 1, "out": [said("x")]}, Columns(answer_key="out")).answer == "x"


def test_conversations_of_both_kinds_keep_roles_and_further_fields() -> None:
    chat = [
        {"from": "system", "value": "s"},
        {"from": "human", "value": "h", "weight": 1, "name": None},
        {"from": "function_call", "value": "f"},
        {"from": "observation", "value": "o"},
    ]
    assert read_messages(chat, "d", "prompt") == (
        {"role": "system", "content": "s"},
        {"role": "user", "content": "h", "weight": 1},
        {"role": "assistant", "content": "f"},
        {"role": "tool", "content": "o"},
    )
    both = ({"role": "user", "content": "x", "from": "gpt", "value": "y"},)
    assert read_messages(both, "d", "prompt")[0]["role"] == "user"
    every = [{"role": role, "content": "x"} for role in ("system", "developer", "user", "assistant", "tool")]
    assert [m["role"] for m in read_messages(every, "d", "prompt")] == [m["role"] for m in every]
    assert split_reply((user("a"), said("b"), user("c"), said("d")), "d", "p") == (
        (user("a"), said("b"), user("c")),
        "d",
    )
    assert split_reply((user("a"), {"role": "tool", "content": "t"}), "d", "p")[1] is None


def test_a_dotted_name_reaches_into_records_and_null_is_absent() -> None:
    record = {"a.b": 1, "a": {"b": 2, "c": None, "d": {"e": 0}}, "n": None}
    assert get(record, "a.b") == 1 and get(record, "a.d.e") == 0 and get(record, "a.d") == {"e": 0}
    assert all(get(record, name) is ABSENT for name in ("n", "a.c", "a.x", "a.b.c", "x", "a.d.e.f"))
    assert get({"a.b": None, "a": {"b": 2}}, "a.b") == 2


@pytest.mark.parametrize(
    ("record", "prompt", "truth", "more", "sentence"),
    [
        ({"prompt": 1, "answer": 2}, "prompt", None, None, ""),
        ({"prompt": None, "Problem": 1, "answer": 2}, "Problem", None, None, "the question is column 'Problem'"),
        ({"question": 1, "problem": 2, "answer": 3}, "question", None, None, "the question is column 'question'"),
        ({"problem": 2, "messages": 3, "answer": 3}, "messages", None, None, "the question is column 'messages'"),
        ({"Prompt": 1, "answer": 2}, "Prompt", None, None, "the question is column 'Prompt'"),
        ({"instruction": 1, "input": 2, "answer": 3}, "instruction", None, "input", "the question is column 'instruction', followed by 'input'"),
        ({"input": 2, "answer": 3}, "input", None, None, "the question is column 'input'"),
        ({"prompt": 1, "input": 2, "answer": 3}, "prompt", None, None, ""),
        ({"prompt": 1, "solution": 2, "Final-Answer": 3}, "prompt", "Final-Answer", None, "the correct answer is column 'Final-Answer'"),
        ({"prompt": 1, "final_answer": 2, "Final Answer": 3}, "prompt", "final_answer", None, "the correct answer is column 'final_answer'"),
        ({"prompt": 1, "label": None, "target": 2}, "prompt", "target", None, "the correct answer is column 'target'"),
        ({"prompt": 1, "completion": 2, "response": 3}, "prompt", "response", None, "the correct answer is column 'response'"),
        ({"prompt": 1, "reward_model": {"ground_truth": 0}, "label": 2}, "prompt", None, None, ""),
        ({"prompt": [user("q"), said("a")]}, "prompt", None, None, "the correct answer is the assistant's last turn"),
        ({"prompt": [user("q"), {"from": "gpt", "value": "a"}]}, "prompt", None, None, "the correct answer is the assistant's last turn"),
        ({"prompt": [said("a"), user("q")]}, "prompt", None, None, ""),
        ({"prompt": []}, "prompt", None, None, ""),
        ({"nothing": 1}, "prompt", None, None, ""),
    ],
)  # fmt: skip
def test_columns_are_found_by_the_first_record(record: Any, prompt: str, truth: Any, more: Any, sentence: str) -> None:
    default = Columns()
    found = Columns(prompt, truth or default.ground_truth_key, input_key=more)
    assert find_columns(record, default) == (found, sentence)


def test_named_columns_stay_and_are_known_as_named() -> None:
    assert find_columns({"question": 1, "label": 2}, Columns("q", "t")) == (Columns("q", "t"), "")
    assert find_columns({"question": 1, "label": 2}, Columns(ground_truth_key=None))[0].ground_truth_key is None
    assert find_columns([1], Columns()) == (Columns(), "")
    named = [Columns("q"), Columns(ground_truth_key="t"), Columns(ground_truth_key=""), Columns(answer_key="a")]
    assert all(columns.are_named for columns in named)
    plain = [Columns(), Columns(ground_truth_key=None), Columns(data_source_key="s"), Columns(answer_key="")]
    assert not any(columns.are_named for columns in plain)


def test_the_first_record_decides_for_all_and_what_is_guessed_is_said_once() -> None:
    sentences: list[str] = []
    records = [{"question": "a", "label": 1}, {"question": "b", "label": 2, "prompt": "no"}]
    rows = as_rows([Row("own", user_message("x")), *records], "d", say=sentences.append)
    assert [(row.uid, row.messages[0]["content"], row.ground_truth) for row in rows[1:]] == [
        ("d:2", "a", 1),
        ("d:3", "b", 2),
    ]
    assert sentences == [
        "d: the question is column 'question', the correct answer is column 'label' "
        "(data.prompt_key, data.ground_truth_key and data.response_key name others)"
    ]
    with pytest.raises(DataError, match=r"^d:2: is a list; expected an object with named fields"):
        as_rows([{"prompt": "a", "answer": 1}, []], "d")  # type: ignore[list-item]


def test_a_second_text_follows_only_where_it_says_something() -> None:
    columns = Columns("instruction", "output", input_key="input")
    for more, text in (("x", "do\n\nx"), (" ", "do"), (None, "do"), (3, "do")):
        row = to_row({"instruction": "do", "input": more, "output": "y"}, "d", columns)
        assert row.messages[0]["content"] == text
    chat = to_row({"instruction": [user("do")], "input": "x", "output": "y"}, "d", columns)
    assert chat.messages == (user("do"),)


def test_a_value_is_shown_up_to_sixty_characters() -> None:
    assert show("x" * 58) == '"' + "x" * 58 + '"'
    assert show("x" * 59) == '"' + "x" * 56 + "..."
    assert show({"é": (1,)}) == '{"é": [1]}' and show(object)[:1] == '"'


def test_named_columns_are_used_in_gsm8ks_format_too_and_a_reply_is_no_named_truth() -> None:
    marked = {"question": "1+1?", "answer": "two #### 2"}
    assert read(marked).ground_truth == "2"
    row = read(marked, Columns("question"))
    assert (row.data_source, row.ground_truth, row.messages) == ("unknown", "two #### 2", user_message("1+1?"))
    assert read({"prompt": "q", "ground_truth": 0.5}).ground_truth == 0.5
    with pytest.raises(DataError, match="field 'mine' is missing"):
        read({"prompt": [user("q"), said("r")]}, Columns(ground_truth_key="mine"))
