"""What the web application needs of that which answers: who a request is from, how it is read, where it is queued."""

from __future__ import annotations

import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gspo.environments.formats import ToolFormat
from gspo.serving.batcher import Batcher
from gspo.serving.jobs import Job, JobCounts, Send
from gspo.serving.parameters import Ask
from gspo.serving.prompts import Prompted, PromptReader


class JobQueue(Protocol):
    """Accepts requests, from any thread. `name` is the id of the answer."""

    def open(self, prompted: Prompted, ask: Ask, send: Send, name: str = "") -> Job: ...

    def cancel(self, job: Job) -> None: ...


class Reader(Protocol):
    """Makes prompts of bodies."""

    @property
    def tool_format(self) -> ToolFormat: ...

    def chat(self, messages: Any, tools: Sequence[Mapping[str, Any]], options: Any = None) -> Prompted: ...

    def completions(self, prompt: Any) -> list[Prompted]: ...

    def tokens(self, token_ids: Any, name: str) -> Prompted: ...


@dataclass(frozen=True, slots=True)
class Client:
    """How the requests of one key are read, and where they go."""

    reader: Reader
    queue: JobQueue


class Backend(Protocol):
    """What answers: it knows the clients, each by its key, and how much is in flight."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def num_open(self) -> int: ...

    @property
    def counts(self) -> JobCounts: ...

    def client(self, key: str) -> Client | None:
        """The client with this key ("" without one); None when the key is wrong."""
        ...


class SharedBackend:
    """The backend of a server: everyone with the key, or without any key everyone, is the same client."""

    def __init__(self, reader: PromptReader, batcher: Batcher, api_key: str | None = None) -> None:
        self._client, self.batcher, self._key = Client(reader, batcher), batcher, api_key

    def client(self, key: str) -> Client | None:
        is_right = self._key is None or hmac.compare_digest(key.encode(), self._key.encode())
        return self._client if is_right else None

    @property
    def is_alive(self) -> bool:
        return self.batcher.is_alive

    @property
    def num_open(self) -> int:
        return self.batcher.num_open

    @property
    def counts(self) -> JobCounts:
        return self.batcher.counts
