"""What the wire forms share: choices gathered from updates, usage, names, and the form of an answer."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gspo.serving.parameters import Ask
from gspo.serving.prompts import Prompted
from gspo.serving.replies import TopTokens, Update

TokenText = Callable[[int], str]


@dataclass(slots=True)
class Choice:
    """One response, gathered from its updates."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    top: list[TopTokens] = field(default_factory=list)
    reason: str | None = None
    stop_text: str | None = None

    def add(self, update: Update) -> None:
        self.text += update.text
        self.token_ids += update.token_ids
        self.log_probs += update.log_probs
        self.top += update.top
        self.reason, self.stop_text = update.reason, update.stop_text


class Answer(ABC):
    """Writes the answer to one request: whole, or in chunks while updates come.

    Choice i belongs to prompt i // n.
    """

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(self, model: str, ask: Ask, prompts: Sequence[Prompted], token_text: TokenText) -> None:
        self.model, self.ask, self.prompts, self.token_text = model, ask, prompts, token_text
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.created = int(time.time())
        self.choices = [Choice() for _ in range(len(prompts) * ask.n)]

    @abstractmethod
    def whole(self) -> dict[str, Any]:
        """The answer, from all that was added to `choices`."""

    @abstractmethod
    def chunks(self, update: Update) -> list[dict[str, Any]]:
        """The pieces of a streamed answer that an update adds, which was added to `choices` before."""

    def opening(self) -> list[dict[str, Any]]:
        """The pieces with which a streamed answer begins."""
        return []

    def closing(self) -> list[dict[str, Any]]:
        """The pieces with which a streamed answer ends."""
        return [self.envelope(self.chunk_kind, [], usage=self.usage)] if self.ask.include_usage else []

    def envelope(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}

    @property
    def usage(self) -> dict[str, int]:
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        num_written = sum(len(choice.token_ids) for choice in self.choices)
        return {"prompt_tokens": num_prompt, "completion_tokens": num_written, "total_tokens": num_prompt + num_written}
