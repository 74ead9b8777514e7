"""Records of files and hub datasets to rows: verl's row format, or columns named by the user."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gspo.data.rows import DataError, Row, user_message

_ROLES = ("system", "developer", "user", "assistant", "tool")
_ANSWER_COLUMNS = ("answer", "response", "completion", "extra_info.answer")
_TRUTH_COLUMNS = ("ground_truth", "answer")
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns hold what; a dotted name reaches into a nested record.

    `prompt_key`: chat messages, or a text, which becomes the user's message. `ground_truth_key`: the correct answer
    (`ground_truth` and `answer` are tried next; empty or None means that the reward needs none). `answer_key`: the text
    that `gspo sft` imitates (by default `answer`, `response`, `completion` or `extra_info.answer`).
    """

    prompt_key: str = "prompt"
    ground_truth_key: str | None = "reward_model.ground_truth"
    data_source_key: str = "data_source"
    answer_key: str | None = None


def as_rows(records: Iterable[Row | Mapping[str, Any]], name: str, columns: Columns | None = None) -> list[Row]:
    """Rows from Python objects: a Row stays as it is, a mapping is read like a line of a file; counted from 1."""
    return [r if isinstance(r, Row) else to_row(r, f"{name}:{i}", columns) for i, r in enumerate(records, start=1)]


def to_row(record: Any, where: str, columns: Columns | None = None) -> Row:
    """One record as a Row with uid `where`; a DataError names the first field that cannot be used."""
    columns = columns or Columns()
    if not isinstance(record, Mapping):
        raise DataError(where, f"is a {type(record).__name__}; expected an object with named fields")
    extra_info = record.get("extra_info")
    if extra_info is not None and not isinstance(extra_info, Mapping):
        raise DataError(where, f"is {_show(extra_info)}; expected an object", field="extra_info")
    used = {key.split(".")[0] for key in (columns.prompt_key, columns.data_source_key)}
    others = {k: v for k, v in record.items() if k not in used and k not in ("extra_info", "reward_model")}
    return Row(
        uid=where,
        messages=_messages(record, where, columns.prompt_key),
        data_source=_data_source(record, where, columns.data_source_key),
        ground_truth=_ground_truth(record, where, columns.ground_truth_key),
        answer=_answer(record, where, columns.answer_key),
        extra={**others, **(extra_info or {})},
    )


def _messages(record: Mapping[str, Any], where: str, key: str) -> tuple[Mapping[str, Any], ...]:
    value = _get(record, key)
    if value is _ABSENT:
        raise DataError(
            where,
            f"is missing; expected chat messages or a text. The row has {_names(record)}; "
            "name its column with data.prompt_key",
            field=key,
        )
    if isinstance(value, str):
        if not value.strip():
            raise DataError(where, "is an empty text; expected a question", field=key)
        return user_message(_unicode(value, where, key))
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(where, f"is {_show(value)}; expected chat messages or a text", field=key)
    messages = tuple(_message(m, where, f"{key}[{i}]") for i, m in enumerate(value))
    if messages[-1]["role"] == "assistant":
        raise DataError(
            where, "is assistant; expected the last message to be one that needs an answer", field=f"{key}[-1].role"
        )
    return messages


def _unicode(text: str, where: str, field: str) -> str:
    """The text itself; a DataError when it cannot be encoded, such as half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(where, f"contains {text[error.start]!r}, which is not a character", field=field) from None
    return text


def _message(message: Any, where: str, field: str) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(where, f"is {_show(message)}; expected an object with role and content", field=field)
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            found = "is missing" if message.get(name) is None else f"is {_show(message[name])}"
            raise DataError(where, f"{found}; expected a text", field=f"{field}.{name}")
        _unicode(message[name], where, f"{field}.{name}")
    if message["role"] not in _ROLES:
        raise DataError(
            where, f"is {_show(message['role'])}; expected one of {', '.join(_ROLES)}", field=f"{field}.role"
        )
    return {k: v for k, v in message.items() if v is not None}


def _data_source(record: Mapping[str, Any], where: str, key: str) -> str:
    value = _get(record, key)
    if value is _ABSENT:
        return "unknown"
    if not isinstance(value, str) or not value:
        raise DataError(where, f"is {_show(value)}; expected the name of a task", field=key)
    return value


def _ground_truth(record: Mapping[str, Any], where: str, key: str | None) -> Any:
    if not key:
        return None
    reward_model = record.get("reward_model")
    if reward_model is not None and not isinstance(reward_model, Mapping):
        raise DataError(where, f"is {_show(reward_model)}; expected an object with ground_truth", field="reward_model")
    for name in (key, *_TRUTH_COLUMNS):
        value = _get(record, name)
        if value is not _ABSENT:
            if isinstance(value, float) and not math.isfinite(value):
                raise DataError(where, f"is {value}; expected a finite number", field=name)
            return value
    raise DataError(
        where,
        f"is missing; expected the correct answer. The row has {_names(record)}; name its column with "
        "data.ground_truth_key, or set that to '' when the reward needs none",
        field=key,
    )


def _answer(record: Mapping[str, Any], where: str, key: str | None) -> str | None:
    if key:
        value = _get(record, key)
        if not isinstance(value, str):
            found = "is missing" if value is _ABSENT else f"is {_show(value)}"
            raise DataError(where, f"{found}; expected a text to imitate", field=key)
        return value
    values = (_get(record, name) for name in _ANSWER_COLUMNS)
    return next((v for v in values if isinstance(v, str)), None)


def _get(record: Mapping[str, Any], dotted: str) -> Any:
    """The value at a dotted name; null counts as absent. A column whose own name contains the dots comes first."""
    if record.get(dotted) is not None:
        return record[dotted]
    value: Any = record
    for part in dotted.split("."):
        if not isinstance(value, Mapping) or value.get(part) is None:
            return _ABSENT
        value = value[part]
    return value


def _names(record: Mapping[str, Any]) -> str:
    return ", ".join(map(str, record)) or "no fields"


def _show(value: Any) -> str:
    text = json.dumps(value, default=repr, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
