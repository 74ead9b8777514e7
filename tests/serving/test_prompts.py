"""From messages and texts to tokens, and what is refused with its place."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.environments.formats import HERMES, TAG
from gspo.serving.errors import ApiError
from gspo.serving.prompts import MAX_PROMPTS, PromptReader, read_messages, read_tools
from tests.rollout.episodes.world import make_tokenizer

TOKENIZER = make_tokenizer()
READER = PromptReader(TOKENIZER, 40, HERMES, {})


def text_of(prompted: Any) -> str:
    return TOKENIZER.decode(prompted.token_ids)


def test_prompts_of_a_completion_are_a_text_tokens_or_a_list_of_either() -> None:
    (one,) = READER.completions("abc")
    assert text_of(one) == "abc" and one.text == "abc"
    several = READER.completions(["a", [5, 6], "b"])
    assert [(p.token_ids, p.text) for p in several] == [((3,), "a"), ((5, 6), None), ((4,), "b")]
    assert [p.token_ids for p in READER.completions([5, 0, 39])] == [(5, 0, 39)]
    assert len(READER.completions(["a"] * MAX_PROMPTS)) == MAX_PROMPTS


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([5, 40], "prompt=40: expected tokens from 0 to 39"),
        ([-1], "prompt=-1: expected tokens from 0 to 39"),
        ([True], "a text or a list of tokens"),
        (7, "a text or a list of tokens"),
        ("", "prompt: no tokens"),
        ([], "prompt: no tokens"),
        ([[]], "prompt: no tokens"),
        (["a"] * (MAX_PROMPTS + 1), f"{MAX_PROMPTS + 1} prompts; expected at most {MAX_PROMPTS}"),
    ],
)
def test_prompts_that_are_none_are_refused(prompt: Any, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        READER.completions(prompt)
    assert (caught.value.status, caught.value.param) == (400, "prompt")


def test_a_chat_is_rendered_up_to_where_the_model_writes() -> None:
    tools = [{"function": {"name": "f"}}]
    prompted = READER.chat([{"role": "user", "content": "a"}, {"role": "user", "content": "b"}], tools)
    assert text_of(prompted) == "a\nb" and prompted.tools is tools
    assert [m["content"] for m in prompted.messages] == ["a", "b"]
    inline = PromptReader(TOKENIZER, 40, TAG, {})
    call = {"function": {"name": "f", "arguments": '{"x": "1"}'}}
    begun = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "so ", "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    opened = inline.chat(begun, tools)
    assert text_of(opened) == "aso <tool>1</tool><result>2</result>" and len(opened.messages) == 3
    with pytest.raises(ApiError, match=r"chat_template_kwargs=3: expected an object"):
        READER.chat(begun, tools, 3)


def test_tools_and_options_reach_the_template_and_its_own_refusal_is_named() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = (
        "{% if refuse %}{{ raise_exception('no') }}{% endif %}{{ mode }}{{ tools | length if tools else 0 }}"
        "{% for m in messages %}{{ m.content }}{% endfor %}"
    )
    tools, messages = [{"function": {"name": "f"}}], [{"role": "user", "content": "x"}]
    reader = PromptReader(tokenizer, 64, HERMES, {"mode": "a"})
    assert text_of(reader.chat(messages, [])) == "a0x" and text_of(reader.chat(messages, tools)) == "a1x"
    assert text_of(reader.chat(messages, tools, {"mode": "b"})) == "b1x"
    assert text_of(PromptReader(tokenizer, 64, TAG, {"mode": "a"}).chat(messages, tools)) == "a0x", "inline"
    with pytest.raises(ApiError, match="chat template refuses them: no") as caught:
        reader.chat(messages, [], {"refuse": True})
    assert caught.value.param == "messages"


USER = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "a list of at least one message"),
        ("hi", "a list of at least one message"),
        ([USER, {"role": "robot"}], r"messages\[1\]: expected an object with a role of system, developer"),
        ([USER, "hi"], r"messages\[1\]: expected an object"),
        ([{**USER, "content": 3}], r"messages\[0\]\.content: expected a text"),
        ([{**USER, "content": [{"type": "image", "text": "x"}]}], r"messages\[0\]\.content"),
        ([{**USER, "tool_calls": [{"id": 1}]}], r"messages\[0\]\.tool_calls: expected objects with function\.name"),
        ([{**USER, "tool_calls": [{"function": {"name": "f", "arguments": "["}}]}], "are no JSON object"),
        ([{**USER, "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}], "are no JSON object"),
        ([{**USER, "tool_calls": [{"function": {"name": "f", "arguments": "[" * 100_000}}]}], "are no JSON object"),
    ],
)
def test_messages_that_are_none_are_refused_with_their_place(messages: Any, message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        read_messages(messages)
    assert caught.value.status == 400


def test_tools_have_names() -> None:
    good = [{"type": "function", "function": {"name": "f"}}]
    assert read_tools(good) == good and read_tools([]) == []
    for bad in ({"function": {}}, [3], [{"function": {"name": 3}}], [*good, {}]):
        with pytest.raises(ApiError, match="tools="):
            read_tools(bad)
