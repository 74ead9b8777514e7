"""Chat messages of a record: role and content, or ShareGPT's `from` and `value`; each is checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gspo.data.rows import DataError, user_message

Messages = tuple[Mapping[str, Any], ...]

ROLES = ("system", "developer", "user", "assistant", "tool")
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}


def read_messages(value: Any, where: str, field: str) -> Messages:
    """A text as the user's message, or a list of messages; a DataError names the first that cannot be used."""
    if isinstance(value, str):
        if not value.strip():
            raise DataError(where, "is an empty text; expected a question", field=field)
        return user_message(_unicode(value, where, field))
    if not isinstance(value, (list, tuple)) or not value:
        raise DataError(where, f"is {show(value)}; expected chat messages or a text", field=field)
    return tuple(_message(m, where, f"{field}[{i}]") for i, m in enumerate(value))


def split_reply(messages: Messages, where: str, field: str) -> tuple[Messages, str | None]:
    """The messages that need an answer, and the text of the assistant's turn that follows them, if there is one."""
    if messages[-1]["role"] != "assistant":
        return messages, None
    if len(messages) == 1 or messages[-2]["role"] == "assistant":
        raise DataError(
            where, "is assistant; expected a message that needs an answer before it", field=f"{field}[-1].role"
        )
    return messages[:-1], messages[-1]["content"]


def _message(message: Any, where: str, field: str) -> Mapping[str, Any]:
    if not isinstance(message, Mapping):
        raise DataError(where, f"is {show(message)}; expected an object with role and content", field=field)
    if "role" not in message and "from" in message:
        message = _from_sharegpt(message)
    for name in ("role", "content"):
        if not isinstance(message.get(name), str):
            found = "is missing" if message.get(name) is None else f"is {show(message[name])}"
            raise DataError(where, f"{found}; expected a text", field=f"{field}.{name}")
        _unicode(message[name], where, f"{field}.{name}")
    if message["role"] not in ROLES:
        raise DataError(where, f"is {show(message['role'])}; expected one of {', '.join(ROLES)}", field=f"{field}.role")
    return {k: v for k, v in message.items() if v is not None}


def _from_sharegpt(message: Mapping[str, Any]) -> Mapping[str, Any]:
    others = {k: v for k, v in message.items() if k not in ("from", "value")}
    role = message["from"]
    return {"role": _SHAREGPT_ROLES.get(role, role), "content": message.get("value"), **others}


def _unicode(text: str, where: str, field: str) -> str:
    """The text itself; a DataError when it cannot be encoded, such as half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(where, f"contains {text[error.start]!r}, which is not a character", field=field) from None
    return text


def show(value: Any) -> str:
    """A value for a message, shortened."""
    text = json.dumps(value, default=repr, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
