"""Records of files, hub datasets and Python lists to rows: verl's format, GSM8K's, usual columns or named ones."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gspo.data.messages import Messages, read_messages, show, split_reply
from gspo.data.rows import DataError, Row
from gspo.data.tasks.gsm8k import is_gsm8k, to_gsm8k_row
from gspo.data.usual_columns import ABSENT, ANSWER_COLUMNS, DEFAULT, TRUTH_COLUMNS, Columns, find_columns, get

__all__ = ["Columns", "Say", "as_rows", "records_to_rows", "to_row"]

Say = Callable[[str], None]


def as_rows(
    records: Iterable[Row | Mapping[str, Any]], name: str, columns: Columns | None = None, say: Say | None = None
) -> list[Row]:
    """Rows from Python objects: a Row stays as it is, a mapping is read like a line of a file; counted from 1."""
    numbered = ((f"{name}:{i}", record) for i, record in enumerate(records, start=1))
    return list(records_to_rows(numbered, name, columns, say))


def records_to_rows(
    records: Iterable[tuple[str, Any]], name: str, columns: Columns | None = None, say: Say | None = None
) -> Iterator[Row]:
    """`(where, record)` as rows. The first record decides the format: GSM8K's own, or which usual columns are used.

    `say` gets a sentence about columns that were guessed. Columns that the user names are used as they are.
    """
    read: Callable[[Any, str], Row] | None = None
    for where, record in records:
        if isinstance(record, Row):
            yield record
            continue
        read = read or _reader(record, name, columns or DEFAULT, say)
        yield read(record, where)


def _reader(first: Any, name: str, columns: Columns, say: Say | None) -> Callable[[Any, str], Row]:
    """What turns the records of a dataset into rows, by its first record."""
    if not columns.are_named and is_gsm8k(first):
        return to_gsm8k_row
    found, guesses = find_columns(first, columns)
    if guesses and say is not None:
        say(f"{name}: {guesses} (data.prompt_key, data.ground_truth_key and data.response_key name others)")
    return functools.partial(to_row, columns=found)


def to_row(record: Any, where: str, columns: Columns | None = None) -> Row:
    """One record as a Row with uid `where`; a DataError names the first field that cannot be used."""
    columns = columns or DEFAULT
    if not isinstance(record, Mapping):
        raise DataError(where, f"is a {type(record).__name__}; expected an object with named fields")
    extra_info = record.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, Mapping):
        raise DataError(where, f"is {show(extra_info)}; expected an object", field="extra_info")
    used = {key.split(".")[0] for key in (columns.prompt_key, columns.data_source_key)}
    others = {k: v for k, v in record.items() if k not in used and k not in ("extra_info", "reward_model")}
    messages, reply = _messages(record, where, columns)
    return Row(
        uid=where,
        messages=messages,
        data_source=_data_source(record, where, columns.data_source_key),
        ground_truth=_ground_truth(record, where, columns.ground_truth_key, reply),
        answer=_answer(record, where, columns.answer_key, reply),
        extra={**others, **(extra_info or {})},
    )


def _messages(record: Mapping[str, Any], where: str, columns: Columns) -> tuple[Messages, str | None]:
    """The messages that need an answer, and the assistant's turn that follows them, if there is one."""
    key = columns.prompt_key
    value = get(record, key)
    if value is ABSENT:
        raise DataError(
            where,
            f"is missing; expected chat messages or a text. The row has {_names(record)}; "
            "name its column with data.prompt_key",
            field=key,
        )
    more = record.get(columns.input_key) if columns.input_key else None
    if isinstance(value, str) and isinstance(more, str) and more.strip():
        value = f"{value}\n\n{more}"
    return split_reply(read_messages(value, where, key), where, key)


def _data_source(record: Mapping[str, Any], where: str, key: str) -> str:
    value = get(record, key)
    if value is ABSENT:
        return "unknown"
    if not isinstance(value, str) or not value:
        raise DataError(where, f"is {show(value)}; expected the name of a task", field=key)
    return value


def _ground_truth(record: Mapping[str, Any], where: str, key: str | None, reply: str | None) -> Any:
    if not key:
        return None
    reward_model = record.get("reward_model")
    if reward_model is not None and not isinstance(reward_model, Mapping):
        raise DataError(where, f"is {show(reward_model)}; expected an object with ground_truth", field="reward_model")
    for name in (key, *TRUTH_COLUMNS):
        value = get(record, name)
        if value is not ABSENT:
            if isinstance(value, float) and not math.isfinite(value):
                raise DataError(where, f"is {value}; expected a finite number", field=name)
            return value
    if reply is not None and key == DEFAULT.ground_truth_key:
        return reply
    raise DataError(
        where,
        f"is missing; expected the correct answer. The row has {_names(record)}; name its column with "
        "data.ground_truth_key, or set that to '' when the reward needs none",
        field=key,
    )


def _answer(record: Mapping[str, Any], where: str, key: str | None, reply: str | None) -> str | None:
    if key:
        value = _text(get(record, key))
        if not isinstance(value, str):
            found = "is missing" if value is ABSENT else f"is {show(value)}"
            raise DataError(where, f"{found}; expected a text to imitate", field=key)
        return value
    if reply is not None:
        return reply
    values = (_text(get(record, name)) for name in ANSWER_COLUMNS)
    return next((v for v in values if isinstance(v, str)), None)


def _text(value: Any) -> Any:
    """The text of a completion that is a list with one assistant message; any other value as it is."""
    match value:
        case [{"role": "assistant", "content": str() as text}]:
            return text
    return value


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(map(str, record)) or "no fields"
