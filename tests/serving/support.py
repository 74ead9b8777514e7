"""Servers on loopback for tests."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import openai

from gspo.build.served.engine import ServedEngine, open_engine
from gspo.build.served.source import find_source
from gspo.serving.app import Served, build_app
from gspo.serving.backend import SharedBackend
from gspo.serving.batcher import Batcher
from gspo.serving.server import serving

KEY = "a-key-of-a-test"
PATIENT: Any = {
    "max_retries": 0,
    "timeout": 600.0,
}  # the client's own limit for a connection is 5 s, too short on a busy machine


@dataclasses.dataclass
class Running:
    url: str
    batcher: Batcher

    def client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": KEY, **PATIENT, **options})

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key=KEY, **PATIENT)


def embedded(**options: Any) -> ServedEngine:
    return open_engine(find_source("embedded"), device="cpu", **{"num_slots": 16, "max_length": 256, **options})


@contextlib.contextmanager
def running(
    opened: ServedEngine, *, max_queue: int = 1024, api_key: str | None = KEY, **options: Any
) -> Iterator[Running]:
    """A server of the embedded model, with the name `embedded`."""
    batcher = Batcher(opened.engine, opened.decode, max_open=max_queue)
    served = Served(
        "embedded",
        SharedBackend(opened.reader, batcher, api_key),
        opened.token_text,
        opened.max_length,
        opened.num_slots,
        **options,
    )
    try:
        with serving(build_app(served), drain_seconds=2) as url:
            yield Running(url, batcher)
    finally:
        batcher.close()
