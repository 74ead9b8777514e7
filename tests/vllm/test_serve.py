"""`gspo serve --engine vllm`: the openai client gets what the native engine answers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_process_left")]
PROMPTS = ["14+76+16=", "9*8=", "abc"]


@contextmanager
def serving(model: Path, engine: str) -> Iterator[Any]:
    """A client of `gspo serve`, which is stopped by SIGINT and ends well."""
    words = [sys.executable, "-m", "gspo", "serve", str(model), "--engine", engine, "--port", "0", "--device", "cpu"]
    words += ["--max-model-len", "128", "--max-num-seqs", "8"]
    server = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    assert server.stdout is not None
    lines = []
    try:
        for line in server.stdout:
            lines.append(line)
            if found := re.search(r"at (http://127.0.0.1:\d+/v1)", line):
                break
        else:
            pytest.fail("".join(lines))
        yield openai.OpenAI(base_url=found.group(1), api_key="none", max_retries=0, timeout=120)
        server.send_signal(signal.SIGINT)
        server.stdout.read()
        assert server.wait(60) in (0, -signal.SIGINT, 128 + signal.SIGINT)
    finally:
        server.kill()
        server.wait()


def answers(client: Any) -> Any:
    """Greedy answers: whole, as a stream, and with the log-probs of their tokens; the usage of a chat."""
    options = {"model": client.models.list().data[0].id, "max_tokens": 12, "temperature": 0}
    whole = [client.completions.create(prompt=prompt, **options).choices[0].text for prompt in PROMPTS]
    stream = client.completions.create(prompt=PROMPTS[0], stream=True, **options)
    parts = "".join(chunk.choices[0].text for chunk in stream)
    scored = client.completions.create(prompt=PROMPTS[0], logprobs=0, **options).choices[0].logprobs
    messages = [{"role": "user", "content": PROMPTS[0]}]
    chat = client.chat.completions.create(messages=messages, n=2, stop=["zz"], **options)
    texts = [choice.message.content for choice in chat.choices]
    return whole, parts, texts, chat.usage.prompt_tokens, pytest.approx(scored.token_logprobs, abs=1e-3)


def test_answers_are_those_of_the_native_engine(model_folder: Path) -> None:
    found = []
    for engine in ("native", "vllm"):
        with serving(model_folder, engine) as client:
            found.append(answers(client))
    native, vllm = found
    assert vllm[:4] == native[:4] and vllm[1] == vllm[0][0]
    assert vllm[4].expected == native[4]


def test_errors_and_samples_go_through_vllm(model_folder: Path) -> None:
    with serving(model_folder, "vllm") as client:
        name = client.models.list().data[0].id
        with pytest.raises(openai.BadRequestError, match="128"):
            client.completions.create(model=name, prompt="1", max_tokens=500)
        drawn = {"model": name, "prompt": "1+", "max_tokens": 10, "temperature": 1, "extra_body": {"ignore_eos": True}}
        first, second = (client.completions.create(seed=seed, **drawn).choices[0].text for seed in (3, 3))
        assert first == second
