"""The fields of a request and its messages, read one by one: values, ranges, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.environments.formats import TAG
from gspo.rollout.engine import SamplingParams
from gspo.serving.errors import ApiError
from gspo.serving.parameters import Ask, Fields, read_ask
from gspo.serving.prompts import read_messages, split_inline


def read(**values: Any) -> Ask:
    fields = Fields(values)
    ask = read_ask(fields, num_top=2, log_probs=True, default_tokens=16)
    fields.finish()
    return ask


def test_without_fields_an_answer_is_drawn_once_at_temperature_1() -> None:
    assert read() == read(temperature=None, n=None) == Ask(SamplingParams(16, num_top=2), log_probs=True)


def test_every_field_reaches_its_place() -> None:
    values = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.25,
        "max_tokens": 9,
        "stop_token_ids": [3, 4],
        "ignore_eos": True,
        "n": 3,
        "seed": -5,
        "stop": "end",
        "include_stop_str_in_output": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    params = SamplingParams(9, 0.5, top_k=7, top_p=0.25, stop_token_ids=(3, 4), ignore_eos=True, num_top=2)
    assert read(**values) == Ask(params, 3, -5, ("end",), True, True, True, True, True)


def test_of_a_top_k_of_0_and_of_minus_1_all_tokens_are_drawn() -> None:
    assert read(top_k=0).params.top_k == read(top_k=-1).params.top_k == read().params.top_k == -1


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("temperature", (0, 100), (-0.01, 100.1, True, "1", float("nan"))),
        ("top_p", (0.001, 1), (0, 1.001)),
        ("top_k", (-1, 5), (-2, 1.0)),
        ("n", (1, 128), (0, 129)),
        ("max_tokens", (1,), (0, True)),
        ("seed", (-(2**63), 2**63 - 1), (2**63, 1.0)),
        ("stop", ("a" * 256, ["a"] * 16), ("a" * 257, ["a"] * 17, "", [""], [1])),
        ("stop_token_ids", ([1] * 16, []), ([1] * 17, [True], ["1"], 3, [-1], [2**31])),
        ("stream", (True, False), (1, "true")),
        ("presence_penalty", (0,), (0.1,)),
        ("repetition_penalty", (1,), (0,)),
        ("response_format", ({"type": "text"},), ({"type": "json_object"},)),
        ("echo", (False,), (True,)),
        ("user", ("anyone",), ()),
    ],
)
def test_the_range_of_each_field(name: str, good: tuple[Any, ...], bad: tuple[Any, ...]) -> None:
    for value in good:
        read(**{name: value})
    for value in bad:
        with pytest.raises(ApiError, match=name):
            read(**{name: value})


def test_options_of_a_stream_need_one_and_unknown_fields_are_named() -> None:
    with pytest.raises(ApiError, match="stream_options"):
        read(stream_options={"include_usage": True})
    assert not read(stream=True).include_usage
    with pytest.raises(ApiError, match="temprature: unknown field"):
        read(temprature=1)


def test_messages_are_read_with_their_calls() -> None:
    call = {"id": "c1", "function": {"name": "add", "arguments": '{"a": 1}'}}
    read = read_messages(
        [
            {"role": "user", "content": [{"type": "text", "text": "a"}, "b"], "name": "me", "other": 1},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [call, {"function": {"name": "now", "arguments": None}}],
            },
            {"role": "tool", "content": "2", "tool_call_id": "c1"},
        ]
    )
    assert read == [
        {"role": "user", "content": "ab", "name": "me"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}, "id": "c1"},
                {"type": "function", "function": {"name": "now", "arguments": {}}},
            ],
        },
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]


def message(role: str, content: str, *inputs: str) -> dict[str, Any]:
    calls = [{"function": {"name": "", "arguments": {"input": text}}} for text in inputs]
    return {"role": role, "content": content, **({"tool_calls": calls} if calls else {})}


def test_inline_calls_and_their_answers_go_back_into_the_turn_of_the_model() -> None:
    begun = [message("user", "1+2?"), message("assistant", "so ", "1+2"), message("tool", "3")]
    opened = "so <tool>1+2</tool><result>3</result>"
    assert split_inline(begun, TAG) == ([message("user", "1+2?")], opened)
    ended = [message("user", "1+2?"), message("assistant", f"{opened}3!")]
    assert split_inline([*begun, message("assistant", "3!")], TAG) == (ended, "")
    again = [*ended, message("user", "2+2?")]
    assert split_inline([*begun, message("assistant", "3!"), message("user", "2+2?")], TAG) == (again, "")
    with pytest.raises(ApiError, match="answers no tool call"):
        split_inline([message("user", "1+2?"), message("tool", "3")], TAG)
