"""A small OpenAI-compatible server on this machine that judges answers, rightly, wrongly, slowly or not at all."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

KEY = "sk-secret-of-the-test"


def parts(text: str, tag: str) -> list[str]:
    """The texts between the tags of a question."""
    return [match[2] for match in re.finditer(rf"<({tag}-\w+)>\n(.*?)\n</\1>", text, re.DOTALL)]


def by_reference(text: str) -> str:
    """The verdict of a judge that compares the answer with the reference."""
    right = parts(text, "answer")[0].strip() == parts(text, "reference")[0].strip()
    return json.dumps({"reason": "compared", "verdict": "right" if right else "wrong"})


def even_first(text: str) -> str:
    """Right when the first character's code is even, as small_run.even_first_byte."""
    answer = parts(text, "answer")[0]
    right = bool(answer) and ord(answer[0]) % 2 == 0
    return json.dumps({"reason": f"the answer begins with {answer[:1]!r}", "verdict": "right" if right else "wrong"})


class JudgeServer(ThreadingHTTPServer):
    """`mode` says how it behaves from now on; `requests` are the bodies of all calls, `keys` their authorizations."""

    daemon_threads = True
    request_queue_size = 128  # connections that wait to be accepted

    def __init__(self, verdict: Callable[[str], str] = by_reference) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.verdict = verdict
        self.mode: str | Callable[[dict[str, Any]], str] = "right"  # or by the request
        self.requests: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.other = ""  # the address of another server
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that gave up is no error of the server."""


class Handler(BaseHTTPRequestHandler):
    server: JudgeServer
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with server.lock:
            server.requests.append(body)
            server.keys.append(self.headers.get("authorization", ""))
            number = len(server.requests)
        question = body["messages"][-1]["content"]
        mode = server.mode(body) if callable(server.mode) else server.mode
        if mode == "slow":
            time.sleep(30)
        elif mode == "500":
            return self.answer(500, {"error": {"message": "out of memory"}})
        elif mode == "401":
            return self.answer(401, {"error": {"message": f"bad key {self.headers['authorization']}"}})
        elif mode == "429 once" and number == 1:
            return self.answer(429, {"error": {"message": "too many"}}, {"Retry-After": "0.2"})
        elif mode == "429 first" and server.requests.count(body) == 1:
            return self.answer(429, {"error": {"message": "too many"}}, {"Retry-After": "0.05"})
        elif mode == "elsewhere":
            return self.answer(307, {}, {"Location": f"{server.other}/chat/completions"})
        elif mode == "in a circle":
            return self.answer(307, {}, {"Location": self.path})
        elif mode == "not packed":
            return self.answer(200, "these bytes are not zipped", {"Content-Encoding": "gzip"})
        elif mode == "half a body":
            self.close_connection = True
            return self.answer(200, '{"choices": [{"mess', length=500)
        elif mode == "no choices":
            return self.answer(200, {"choices": []})
        elif mode == "brackets":
            return self.answer(200, "[" * 10_000)
        elif mode == "endless":
            return self.answer(200, " " * 20_000_000)
        elif mode == "garbage":
            return self.answer(200, "<html>the proxy says hello</html>")
        elif mode == "no verdict":
            return self.chat("I would rather not say, 10 out of ten for style.")
        elif mode == "refusing":
            return self.chat(None, refusal="I cannot help with that.")
        elif mode == "hangs up":
            self.close_connection = True
            return self.connection.shutdown(socket.SHUT_RDWR)
        reply = server.verdict(question)
        if mode == "wrong":
            swapped = {"right": "wrong", "wrong": "right"}
            reply = re.sub(r'"(right|wrong)"', lambda match: f'"{swapped[match[1]]}"', reply)
        return self.chat(reply)

    def chat(self, text: str | None, **more: Any) -> None:
        message = {"role": "assistant", "content": text, **more}
        usage = {"prompt_tokens": 90, "completion_tokens": 10, "total_tokens": 100}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.answer(200, {"id": "1", "object": "chat.completion", "choices": [choice], "usage": usage})

    def answer(self, status: int, body: Any, headers: dict[str, str] | None = None, length: int | None = None) -> None:
        """`length` is what the head says of a body that ends before."""
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **(headers or {})}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length or len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@contextmanager
def judge_server(verdict: Callable[[str], str] = by_reference) -> Iterator[JudgeServer]:
    """A running server, stopped at the end."""
    server = JudgeServer(verdict)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
