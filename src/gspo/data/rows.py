"""One row of a dataset, before tokenization, and the error that names a broken one."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class DataError(ValueError):
    """Data that cannot be used. The message starts with where (`file:line` or a dataset's name) and names the field."""

    def __init__(self, where: str, problem: str, *, field: str | None = None) -> None:
        self.where = where
        self.field = field
        super().__init__(f"{where}: field {field!r} {problem}" if field else f"{where}: {problem}")


class HubDataError(DataError):
    """A dataset of the hub that cannot be read on this machine; elsewhere it may be."""


@dataclass(frozen=True, slots=True)
class Row:
    """One question, and what its reward needs to grade an answer. `uid` is unique in its dataset and stable across runs.

    `data_source` selects the reward function; `answer` is a text to imitate (`gspo sft`), None when there is none.
    """

    uid: str
    messages: tuple[Mapping[str, Any], ...]
    data_source: str = "unknown"
    ground_truth: Any = None
    answer: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def user_message(text: str) -> tuple[Mapping[str, Any], ...]:
    """The messages of a prompt that is one question."""
    return ({"role": "user", "content": text},)


def visible(text: str) -> str:
    """The text for a terminal: control and format characters as escapes, except line ends, tabs and joiners.

    Data may contain sequences that a terminal executes, and characters that reverse or hide the text beside them.
    """
    return "".join(c.encode("unicode_escape").decode() if _is_hidden(c) else c for c in text)


def _is_hidden(c: str) -> bool:
    return c not in "\n\t\u200c\u200d" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")
