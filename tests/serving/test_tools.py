"""Tools over the API: calls of a scripted model, in every format, whole and streamed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from gspo.environments.formats import FORMATS
from gspo.rollout.engine import GroupRequest, SamplingParams
from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.serving import parameters as serving
from gspo.serving.prompts import Prompted
from gspo.serving.replies import Update
from gspo.serving.wire.chat import ChatAnswer
from gspo.types import Prompt
from tests.serving.support import Running, embedded, running

TOOL: Any = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"terms": {"type": "string"}}}},
}
CALL = {
    "hermes": 'So: <tool_call>\n{"name": "add", "arguments": {"terms": "1+1"}}\n</tool_call>',
    "tag": "So: <tool>1+1</tool>2",
    "python": "So: ```python\n1+1\n```2",
}
Ask = list[Any]


class Scripted(ScriptedEngine):
    """Recites one text; keeps what it was asked."""

    def __init__(self, text: str, encode: Any) -> None:
        tokens = (*encode(text, add_special_tokens=False)["input_ids"], 1)
        super().__init__(lambda prompt, submission, index: ScriptedAnswer(tokens))
        self.asked: list[Prompt] = []

    def submit(self, request: GroupRequest) -> None:
        self.asked.append(request.prompt)
        super().submit(request)


@pytest.fixture(scope="module")
def opened() -> Any:
    return embedded()


@pytest.fixture
def start(opened: Any) -> Iterator[Any]:
    with ExitStack() as stack:

        def start(text: str, format_name: str) -> tuple[Running, Scripted]:
            reader = dataclasses.replace(opened.reader, tool_format=FORMATS[format_name])
            engine = Scripted(text, opened.tokenizer)
            return stack.enter_context(running(dataclasses.replace(opened, engine=engine, reader=reader))), engine

        yield start


@pytest.mark.parametrize("name", ["tag", "python", "hermes"])
def test_a_call_is_read_out_of_the_text(start: Any, name: str) -> None:
    server, _ = start(CALL[name], name)
    tool = {**TOOL, "function": {**TOOL["function"], "name": "python" if name == "python" else "add"}}
    options: Any = {"model": "embedded", "messages": [{"role": "user", "content": "1+1"}], "tools": [tool]}
    choice = server.client().chat.completions.create(**options).choices[0]
    (call,) = choice.message.tool_calls
    wanted = tool["function"]["name"]
    text = "So:" if name == "hermes" else "So: "
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", text, wanted)
    assert json.loads(call.function.arguments) == {"terms": "1+1"}


@pytest.mark.parametrize("name", ["tag", "hermes"])
def test_a_streamed_call_comes_whole_and_its_text_is_not_shown(start: Any, name: str) -> None:
    server, _ = start(CALL[name], name)
    options: Any = {"model": "embedded", "messages": [{"role": "user", "content": "1+1"}], "tools": [TOOL]}
    text, calls, reason = "", [], None
    for chunk in server.client().chat.completions.create(**options, stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        calls += delta.tool_calls or []
        reason = chunk.choices[0].finish_reason or reason
    assert (text, reason) == ("So:" if name == "hermes" else "So: ", "tool_calls")
    assert [json.loads(call.function.arguments) for call in calls] == [{"terms": "1+1"}]


@pytest.mark.parametrize(("name", "shown"), [("tag", "So: "), ("hermes", "So:")])
def test_no_part_of_a_call_is_streamed_however_its_text_arrives(name: str, shown: str) -> None:
    call = CALL[name].removesuffix("2")
    for size in (1, 2, 5, 9):
        prompt, ask = Prompted((1,), tools=[TOOL]), serving.Ask(SamplingParams(99, 1.0), stream=True)
        answer = ChatAnswer("m", ask, prompt, str, FORMATS[name])
        pieces = [call[i : i + size] for i in range(0, len(call), size)]
        updates = [Update(0, piece, (5,), (0.0,)) for piece in pieces] + [Update(0, "", reason="stop")]
        text = ""
        for update in updates:
            answer.choices[0].add(update)
            text += "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in answer.chunks(update))
        assert text == shown


def test_text_that_only_begins_like_a_call_is_shown(start: Any) -> None:
    server, _ = start("a <tool b", "tag")
    options: Any = {"model": "embedded", "messages": [{"role": "user", "content": "1"}], "tools": [TOOL]}
    chunks = list(server.client().chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "a <tool b"
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_the_answer_to_an_inline_call_continues_the_turn(start: Any, opened: Any) -> None:
    """What the client sends back becomes the tokens that the built-in environments would have appended."""
    server, engine = start(CALL["tag"], "tag")
    client, options = server.client(), {"model": "embedded", "tools": [TOOL]}
    messages: Ask = [{"role": "user", "content": "1+1"}]
    reply = client.chat.completions.create(messages=messages, **options).choices[0].message
    messages += [reply, {"role": "tool", "tool_call_id": reply.tool_calls[0].id, "content": "2"}]
    client.chat.completions.create(messages=messages, **options)
    text = opened.tokenizer.decode(engine.asked[-1].token_ids)
    assert text == "<user>1+1<assistant>So: <tool>1+1</tool><result>2</result>"


def test_without_tools_a_call_is_text(start: Any) -> None:
    server, _ = start(CALL["tag"], "tag")
    messages: Ask = [{"role": "user", "content": "1+1"}]
    for options in ({}, {"tools": [TOOL], "tool_choice": "none"}):
        choice = server.client().chat.completions.create(model="embedded", messages=messages, **options).choices[0]
        assert (choice.message.content, choice.message.tool_calls) == (CALL["tag"], None)
