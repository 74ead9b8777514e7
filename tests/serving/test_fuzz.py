"""Bodies of requests with anything in any place: an answer, or a refusal that says why; the server goes on."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serving.support import Running
from tests.serving.test_hostile import exchange, works
from tests.support.mutations import damaged_bytes, damaged_value

SAMPLING = {"max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "seed": 1, "stop": ["x"], "n": 2}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
CHAT = {
    "model": "embedded",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "1+1="}]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "user", "content": "2"},
    ],
    "tools": [TOOL],
    "tool_choice": "auto",
    "logprobs": True,
    "top_logprobs": 2,
    **SAMPLING,
}
COMPLETION = {"prompt": ["1+1=", [5, 6]], "logprobs": 1, "stream": True, "stream_options": {"include_usage": True}}
TOKENS = {"token_ids": [5, 6], "sampling_params": {**SAMPLING, "logprobs": 1}, "request_id": "r"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": {**COMPLETION, **SAMPLING},
    "/inference/v1/generate": TOKENS,
}


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, bytes]:
    path = draw(st.sampled_from(sorted(BODIES)))
    if draw(st.booleans()):
        return path, json.dumps(draw(damaged_value(BODIES[path]))).encode()
    return path, draw(damaged_bytes(json.dumps(BODIES[path]).encode()))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(bodies())
def test_any_body_is_answered_or_refused_with_a_reason(server: Running, body: tuple[str, bytes]) -> None:
    path, raw = body
    status, answer = exchange(server, raw, path)
    assert status == 200 or (400 <= status < 500 and answer["error"]["message"]), (status, answer)


def test_the_bodies_themselves_are_answered_and_the_server_goes_on(server: Running) -> None:
    for path, body in BODIES.items():
        status, answer = exchange(server, json.dumps(body).encode(), path)
        assert status == 200, (path, answer)
    assert works(server)
