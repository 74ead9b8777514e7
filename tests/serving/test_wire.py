"""Answers on the wire: what a whole answer says, and that the pieces of a streamed one add up to it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from gspo.environments.formats import HERMES, TAG, ToolFormat
from gspo.rollout.engine import SamplingParams
from gspo.serving.parameters import Ask
from gspo.serving.prompts import Prompted
from gspo.serving.replies import Update
from gspo.serving.tool_calls import split_calls
from gspo.serving.wire.answer import Answer
from gspo.serving.wire.chat import ChatAnswer
from gspo.serving.wire.completion import CompletionAnswer
from gspo.serving.wire.tokens import TokensAnswer

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {}, "y": {}}}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>'


def ask(**values: Any) -> Ask:
    return Ask(SamplingParams(9), **values)


def chat(how: Ask, tools: Any = (), fmt: ToolFormat = HERMES) -> ChatAnswer:
    return ChatAnswer("m", how, Prompted((1, 2, 3), tools=tools), chr, fmt)


def pieces(rng: random.Random, index: int, text: str, reason: Any = "stop", tops: bool = False) -> list[Update]:
    """A reply of one token per character, cut at random places; the last piece may be empty."""
    cuts = sorted(rng.choices(range(len(text) + 1), k=3))
    bounds = list(zip([0, *cuts], [*cuts, len(text)]))
    updates = []
    for place, (a, b) in enumerate(bounds):
        part = text[a:b]
        best = tuple(((ord(c), -0.5), (ord("?"), -1.5)) for c in part) if tops else ()
        numbers = tuple(map(ord, part)), tuple(-float(i) for i in range(a, b)), (0,) * len(part)
        last = place + 1 == len(bounds)
        updates.append(Update(index, part, *numbers, best, reason if last else None, "!" if last else None))
    return updates


def feed(answer: Answer, updates: Sequence[Update]) -> list[dict[str, Any]]:
    chunks = []
    for update in updates:
        answer.choices[update.index].add(update)
        chunks += answer.chunks(update)
    return chunks


@pytest.mark.parametrize("fmt", [HERMES, TAG])
@pytest.mark.parametrize(
    "text", ["plain", "a < b <", f"so \n{CALL}", CALL, f"a{CALL} {CALL}", "<tool_call>{", "x <tool>1</tool>", " "]
)
def test_the_pieces_of_a_streamed_chat_add_up_to_the_whole_message(text: str, fmt: ToolFormat) -> None:
    rng = random.Random(text)
    for tools in ((), TOOLS):
        for _ in range(6):
            answer = chat(ask(n=2, log_probs=True, return_token_ids=True), tools, fmt)
            chunks = feed(answer, [u for i in (1, 0) for u in pieces(rng, i, text)])
            whole = answer.whole()["choices"]
            for index in range(2):
                mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
                shown = "".join(piece["delta"].get("content", "") for piece in mine)
                message = whole[index]["message"]
                assert shown == (message["content"] or "")
                calls = [call["function"] for piece in mine for call in piece["delta"].get("tool_calls", ())]
                assert calls == [call["function"] for call in message.get("tool_calls", ())]
                assert [p["finish_reason"] for p in mine] == [None] * (len(mine) - 1) + [whole[index]["finish_reason"]]
                assert [t for p in mine for t in p["token_ids"]] == whole[index]["token_ids"] == list(map(ord, text))
                logged = [entry for p in mine for entry in p["logprobs"]["content"]]
                assert logged == whole[index]["logprobs"]["content"] and len(logged) == len(text)


def test_a_whole_chat_answer() -> None:
    answer = chat(ask(log_probs=True, return_token_ids=True))
    feed(answer, [Update(0, "é", (233,), (-0.25,), (0,), (((233, -0.25), (65, -2.0)),), "length")])
    whole = answer.whole()
    assert (whole["object"], whole["model"], whole["prompt_token_ids"]) == ("chat.completion", "m", [1, 2, 3])
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    entry = {"token": "é", "logprob": -0.25, "bytes": [195, 169]}
    best = [entry, {"token": "A", "logprob": -2.0, "bytes": [65]}]
    assert whole["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "é"},
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": {"content": [{**entry, "top_logprobs": best}]},
            "token_ids": [233],
        }
    ]
    plain = chat(ask())
    feed(plain, [Update(0, "a", (97,), (-1.0,), (0,), (), "stop", "!")])
    (choice,) = plain.whole()["choices"]
    assert "prompt_token_ids" not in plain.whole() and "token_ids" not in choice
    assert (choice["logprobs"], choice["stop_reason"]) == (None, "!")


def test_a_streamed_chat_begins_with_its_role_and_ends_with_its_usage_if_asked() -> None:
    answer = chat(ask(n=2, include_usage=True, return_token_ids=True))
    opening = answer.opening()
    assert [c["choices"][0]["index"] for c in opening] == [0, 1]
    assert {json.dumps(c["choices"][0]["delta"]) for c in opening} == {'{"role": "assistant", "content": ""}'}
    assert all(c["prompt_token_ids"] == [1, 2, 3] and c["object"] == "chat.completion.chunk" for c in opening)
    feed(answer, [Update(1, "ab", (97, 98), (-1.0, -1.0), reason="stop")])
    (closing,) = answer.closing()
    assert closing["choices"] == [] and closing["usage"]["completion_tokens"] == 2
    assert chat(ask()).closing() == [] and "prompt_token_ids" not in chat(ask()).opening()[0]
    assert chat(ask()).chunks(Update(0, "")) == []


def completion(how: Ask) -> CompletionAnswer:
    return CompletionAnswer("m", how, [Prompted((1,)), Prompted((2, 3))], chr)


def test_the_choices_of_several_completions_know_their_prompt_and_their_offsets() -> None:
    answer = completion(ask(n=2, log_probs=True, return_token_ids=True))
    rng = random.Random(0)
    chunks = feed(answer, [u for i in range(4) for u in pieces(rng, i, "abcde"[: i + 1], tops=True)])
    whole = answer.whole()
    assert [c["prompt_token_ids"] for c in whole["choices"]] == [[1], [1], [2, 3], [2, 3]]
    assert whole["usage"] == {"prompt_tokens": 3, "completion_tokens": 10, "total_tokens": 13}
    for choice in whole["choices"]:
        size = choice["index"] + 1
        assert choice["text"] == "abcde"[:size] and (choice["finish_reason"], choice["stop_reason"]) == ("stop", "!")
        logged = choice["logprobs"]
        assert (logged["tokens"], logged["text_offset"]) == (list(choice["text"]), list(range(size)))
        assert logged["token_logprobs"] == [-float(i) for i in range(size)]
        assert logged["top_logprobs"] == [{c: -0.5, "?": -1.5} for c in choice["text"]]
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(piece["text"] for piece in mine) == choice["text"]
        assert [o for piece in mine for o in piece["logprobs"]["text_offset"]] == logged["text_offset"]
        assert [t for piece in mine for t in piece["token_ids"]] == choice["token_ids"]
    assert completion(ask()).chunks(Update(0, "")) == []


def test_tokens_go_out_as_numbers() -> None:
    answer = TokensAnswer("m", ask(log_probs=True, include_usage=True), [Prompted((1, 2))], chr)
    assert answer.chunks(Update(0, "")) == []
    first = feed(answer, [Update(0, "a", (7,), (-1.0,), (0,), (((7, -1.0),),))])
    last = feed(answer, [Update(0, "", (), (), (), (), "length")])
    entry = {"token": "token_id:7", "logprob": -1.0, "bytes": None}
    content = [{**entry, "top_logprobs": [entry]}]
    assert [c["choices"][0]["token_ids"] for c in first + last] == [[7], []]
    assert [c["choices"][0]["finish_reason"] for c in first + last] == [None, "length"]
    (choice,) = answer.whole()["choices"]
    assert choice == {"index": 0, "token_ids": [7], "finish_reason": "length", "logprobs": {"content": content}}
    assert (
        answer.whole()["usage"]
        == answer.closing()[0]["usage"]
        == {"prompt_tokens": 2, "completion_tokens": 1, "total_tokens": 3}
    )
    plain = TokensAnswer("m", ask(), [Prompted((1,))], chr)
    assert plain.whole()["choices"][0]["logprobs"] is None and plain.closing() == []
    without_top = TokensAnswer("m", ask(log_probs=True), [Prompted((1,))], chr)
    feed(without_top, [Update(0, "ab", (7, 8), (-1.0, -2.0), (0, 0), (), "stop")])
    logged = without_top.whole()["choices"][0]["logprobs"]["content"]
    assert [(e["token"], e["logprob"], e["top_logprobs"]) for e in logged] == [
        ("token_id:7", -1.0, []),
        ("token_id:8", -2.0, []),
    ]


def arguments(text: str, fmt: ToolFormat, tools: Any) -> list[tuple[str, Any]]:
    _, calls = split_calls(text, fmt, tools)
    assert len({call["id"] for call in calls}) == len(calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_a_call_without_a_name_is_for_the_first_tool_and_its_first_argument() -> None:
    named = {"type": "function", "function": {"name": "g", "parameters": {"properties": {"z": {}, "input": {}}}}}
    assert arguments("a<tool>1</tool>", TAG, [*TOOLS, named]) == [("f", {"x": "1"})]
    assert arguments("a<tool>1</tool>", TAG, [named, *TOOLS]) == [("g", {"input": "1"})]
    assert arguments("a<tool>1</tool>", TAG, [{"function": {"name": "h"}}]) == [("h", {"input": "1"})]
    assert arguments(CALL + CALL, HERMES, TOOLS) == [("f", {"x": 1})] * 2
    assert split_calls("<tool_call>no</tool_call>", HERMES, TOOLS) == ("<tool_call>no</tool_call>", [])
    assert split_calls(CALL, HERMES, TOOLS)[0] is None
