"""Clients that send nonsense, leave, wait or come in crowds: an error each, and the server goes on."""

from __future__ import annotations

import dataclasses
import errno
import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import openai
import pytest

from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.serving import connection
from gspo.serving import server as web
from tests.serving.support import KEY, Running, embedded, running

CHAT = "/v1/chat/completions"


def send(server: Running, head: str, body: bytes = b"") -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)), timeout=30)
    client.sendall(head.encode() + body)
    return client


def exchange(server: Running, body: bytes, path: str = CHAT, headers: str = "") -> tuple[int, Any]:
    """The status and the JSON of the answer to a body."""
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\nConnection: close\r\n{headers}"
    with send(server, f"{head}Content-Length: {len(body)}\r\n\r\n", body) as client:
        raw = b"".join(iter(lambda: client.recv(1 << 16), b""))
    top, _, rest = raw.partition(b"\r\n\r\n")
    return int(top.split()[1]), json.loads(rest) if rest.startswith(b"{") else rest


def wait_until(is_true: Callable[[], bool]) -> None:
    """Wait for another thread; the test's own deadline ends it."""
    for _ in range(3000):
        if is_true():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen")


def works(server: Running) -> bool:
    answer = server.client().completions.create(model="embedded", prompt="1+1=", max_tokens=2)
    return answer.usage is not None and answer.usage.completion_tokens > 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[1, 2]",
        b'"text"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"messages": [{"role": "user", "content": "1"}], "temperature": NaN}',
        b'{"messages": [{"role": "user", "content": "1"}], "temperature": 1e999}',
        b'{"messages": [{"role": "user", "content": "1"}], "temperature": "nan"}',
        b'{"messages": [{"role": "user", "content": "1"}], "temperature": true}',
        b'{"messages": [{"role": "user", "content": "1"}], "max_tokens": 1.5}',
        b'{"messages": [{"role": "user", "content": "1"}], "max_tokens": -1}',
        b'{"messages": [{"role": "user", "content": "1"}], "seed": 99999999999999999999999}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"messages": [{"role": "user", "content": {"a": 1}}]}',
        b'{"messages": {"role": "user"}}',
        b'{"messages": [{"role": "user", "content": "1"}], "tools": [1]}',
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "a", "arguments": "{"}}]}]}',
        b'{"messages": [{"role": "user", "content": "1"}], "stop": 3}',
        b'{"messages": [{"role": "user", "content": "1"}], "stream": "yes"}',
        b'{"messages": [{"role": "user", "content": "1"}], "stream_options": [1]}',
        b'{"messages": [{"role": "user", "content": "1"}], "chat_template_kwargs": 3}',
        b'{"messages": [{"role": "user", "content": "1"}], "chat_template_kwargs": {"chat_template": "1"}}',
        b'{"messages": [{"role": "user", "content": "1"}], "chat_template_kwargs": {"conversation": "1"}}',
        b'{"messages": [{"role": "user", "content": "1"}], "stop_token_ids": [18446744073709551615]}',
        b'{"model": 3, "messages": [{"role": "user", "content": "1"}], "x": null}',
    ],
)
def test_a_malformed_body_is_refused_with_a_reason(server: Running, body: bytes) -> None:
    status, answer = exchange(server, body)
    assert status in (400, 404) and answer["error"]["message"]


@pytest.mark.parametrize(
    "body", [b'{"prompt": [[-1]]}', b'{"prompt": [261]}', b'{"prompt": []}', b'{"prompt": ""}', b'{"prompt": [1, "a"]}']
)
def test_tokens_outside_of_the_vocabulary_are_refused(server: Running, body: bytes) -> None:
    status, answer = exchange(server, body, "/v1/completions")
    assert status == 400 and "prompt" in answer["error"]["message"]
    status, answer = exchange(server, body.replace(b"prompt", b"token_ids"), "/inference/v1/generate")
    assert status == 400 and "token_ids" in answer["error"]["message"]


def test_a_body_over_the_limit_is_refused(server: Running) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "1" * (1 << 20)}]}).encode()
    status, answer = exchange(server, body)
    assert status == 413 and str(1 << 20) in answer["error"]["message"]
    assert works(server)


def test_a_body_without_length_is_limited_too(server: Running) -> None:
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with send(server, head) as client:
        for _ in range(20):
            client.sendall(b"10000\r\n" + b"x" * 0x10000 + b"\r\n")
        client.sendall(b"0\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 413")


def test_unknown_addresses_methods_and_hosts(server: Running) -> None:
    assert exchange(server, b"{}", "/v1/nothing")[0] == 404
    assert exchange(server, b"{}", "/v1/models")[0] == 405
    with send(server, "GET /v1/models HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n") as client:
        assert client.recv(100).startswith(b"HTTP/1.1 403")


def test_a_body_that_does_not_arrive_is_given_up(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "BODY_SECONDS", 0.05)
    head = f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\nContent-Length: 50\r\n\r\n"
    with send(server, head, b'{"mess') as client:
        assert client.recv(100).startswith(b"HTTP/1.1 408")


def test_a_head_that_does_not_arrive_is_given_up(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "HEADER_SECONDS", 0.05)
    with send(server, "GET /v1/mod") as client:
        assert client.recv(100) == b""


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_a_temperature_next_to_zero_is_greedy_and_fails_nobody(server: Running, temperature: float) -> None:
    def ask(value: float) -> str:
        answer = server.client().completions.create(model="embedded", prompt="14+76=", max_tokens=8, temperature=value)
        return answer.choices[0].text

    before = server.batcher.counts.failures
    assert ask(temperature) == ask(0) != ""
    assert server.batcher.counts.failures == before


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_does_not_read_is_disconnected(monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    def small_buffers(host: str, port: int) -> socket.socket:
        listener = listen(host, port)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # those of its connections, too
        return listener

    listen = web.listen
    monkeypatch.setattr(web, "listen", small_buffers)
    monkeypatch.setattr(web, "READ_SECONDS", 0.2)
    body = {"prompt": "1", "max_tokens": 64, "ignore_eos": True, "n": 8, "logprobs": 20, "stream": stream}
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(text)}\r\n\r\n"
    with running(embedded(), api_key=None) as server, socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = server.url.removeprefix("http://").split(":")
        client.connect((host, int(port)))
        client.sendall(head.encode() + text)
        wait_until(lambda: server.batcher.num_open > 0)
        wait_until(lambda: server.batcher.num_open == 0)
        wait_until(lambda: was_reset(client))
        assert works(server)


def was_reset(client: socket.socket) -> bool:
    """Whether the other side has dropped the connection; reads nothing."""
    return client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == errno.ECONNRESET


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_place(server: Running, stream: bool) -> None:
    batcher = server.batcher
    before = batcher.counts.cancelled
    body = {"prompt": "1", "max_tokens": 250, "ignore_eos": True, "n": 3, "temperature": 2, "stream": stream}
    text = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {KEY}\r\n"
    client = send(server, f"{head}Content-Length: {len(text)}\r\n\r\n", text)
    wait_until(lambda: batcher.num_open == 3)
    client.close()
    wait_until(lambda: batcher.num_open == 0)
    assert batcher.counts.cancelled == before + 3
    assert works(server)


def test_a_full_queue_is_said() -> None:
    """A scripted engine that waits keeps its place until it may go on."""
    opened, gate = embedded(), threading.Event()

    class Waiting(ScriptedEngine):
        def step(self) -> Any:
            gate.wait()
            return super().step()

    engine = Waiting(lambda prompt, submission, index: ScriptedAnswer((5, 1)))
    with running(dataclasses.replace(opened, engine=engine), max_queue=2) as server:
        answers: list[Any] = []
        first = threading.Thread(
            target=lambda: answers.append(server.client().completions.create(model="embedded", prompt="1", n=2))
        )
        first.start()
        wait_until(lambda: server.batcher.num_open == 2)
        with pytest.raises(openai.RateLimitError, match="limit of 2") as refused:
            server.client().completions.create(model="embedded", prompt="1")
        assert refused.value.response.headers["retry-after"] == "1"
        gate.set()
        first.join()
        assert len(answers[0].choices) == 2
        assert works(server)


def test_an_engine_that_fails_is_reported_and_the_next_request_works() -> None:
    opened, fails = embedded(), [True]

    class Failing(ScriptedEngine):
        def step(self) -> Any:
            if fails.pop() if fails else False:
                raise FloatingPointError("log-probs that are not finite")
            return super().step()

    engine = Failing(lambda prompt, submission, index: ScriptedAnswer((5, 1)))
    with running(dataclasses.replace(opened, engine=engine)) as server:
        with pytest.raises(openai.InternalServerError, match="not finite"):
            server.client().completions.create(model="embedded", prompt="1")
        assert works(server)
        assert server.batcher.counts.failures == 1


def read_metrics(server: Running) -> dict[str, str]:
    lines = server.client()._client.get(f"{server.url}/metrics").text.splitlines()
    return dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))


def test_whole_and_streamed_answers_are_timed_and_the_first_token_of_streamed_ones(server: Running) -> None:
    def counts() -> tuple[int, int]:
        values = read_metrics(server)
        names = ("gspo_request_seconds_count", "gspo_time_to_first_token_seconds_count")
        return int(values[names[0]]), int(values[names[1]])

    before = counts()
    assert works(server)
    assert counts() == (before[0] + 1, before[1])
    list(server.client().completions.create(model="embedded", prompt="1+1=", max_tokens=6, stream=True))
    assert counts() == (before[0] + 2, before[1] + 1)


def test_metrics_and_health_need_no_key(server: Running) -> None:
    assert works(server)
    assert server.client()._client.get(f"{server.url}/health").status_code == 200
    values = read_metrics(server)
    assert float(values['gspo_requests_total{endpoint="completions",status="200"}']) >= 1
    assert float(values["gspo_generation_tokens_total"]) >= 2
    assert float(values["gspo_responses_running"]) == 0
    assert values["gspo_request_seconds_count"] == values['gspo_request_seconds_bucket{le="+Inf"}']
