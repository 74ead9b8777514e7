"""One row of a dataset, before any tokenizer has seen it, and the error that names a broken one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class DataError(ValueError):
    """Data that cannot be used. The message starts with where (`file:line` or a dataset's name) and names the field."""

    def __init__(self, where: str, problem: str, *, field: str | None = None) -> None:
        self.where = where
        self.field = field
        super().__init__(f"{where}: field {field!r} {problem}" if field else f"{where}: {problem}")


@dataclass(frozen=True, slots=True)
class Row:
    """One question with what is needed to grade its answer. `uid` is unique in its dataset and stable across runs.

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
