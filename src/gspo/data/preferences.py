"""Preference pairs: rows with an answer that was chosen and one that was rejected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gspo.data.rows import DataError, Row
from gspo.data.tasks import arithmetic
from gspo.seeding import derive_seed


@dataclass(frozen=True, slots=True)
class Preference:
    """One question with a better and a worse answer."""

    uid: str
    messages: tuple[Mapping[str, Any], ...]
    chosen: str
    rejected: str


def as_preferences(rows: Iterable[Row]) -> list[Preference]:
    """The pairs of rows with the columns `chosen` and `rejected`: texts, or chats that end with the assistant's message.

    Those of `arithmetic` are made: a right answer and a wrong one, each worked out or direct.
    """
    return [_preference(row) for row in rows]


def _preference(row: Row) -> Preference:
    if row.data_source == "arithmetic" and "chosen" not in row.extra:
        question = str(row.messages[-1]["content"])
        terms = map(int, question.rstrip("=").split("+"))
        pair = arithmetic.preference(question, derive_seed(0, "arithmetic/pair", *terms))
        return Preference(row.uid, row.messages, *pair)
    chosen, rejected = (_reply(row, name) for name in ("chosen", "rejected"))
    return Preference(row.uid, row.messages, chosen, rejected)


def _reply(row: Row, name: str) -> str:
    """The text of an answer."""
    value = row.extra.get(name)
    if isinstance(value, list) and value and isinstance(value[-1], Mapping):
        value = value[-1].get("content")
    if not isinstance(value, str):
        found = "is missing" if value is None else f"is a {type(value).__name__}"
        raise DataError(row.uid, f"{found}; expected a text, or a chat that ends with the answer", field=name)
    return value
