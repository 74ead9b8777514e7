"""Type conversion: checks a value against a key's type and converts it where only one meaning is possible."""

from __future__ import annotations

import types
import typing
from typing import Any

TRUE, FALSE = ("true", "yes", "on"), ("false", "no", "off")


class WrongType(Exception):
    """The value cannot be read as the type."""


def coerce(value: Any, tp: Any) -> Any:
    """`value` as `tp`, or WrongType. "1e-4" and 3 become floats, 3.0 an int, "true" a bool; 2.5 is not an int."""
    if tp is Any:
        return value
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if origin in (types.UnionType, typing.Union):
        return _first(value, args)
    if origin is list:
        if isinstance(value, str) and value and args == (str,):
            value = [word.strip() for word in value.split(",")]  # one name, or several, as a word
        if not isinstance(value, list | tuple):
            raise WrongType
        return [coerce(v, args[0]) for v in value]
    if origin is dict:
        if not isinstance(value, dict):
            raise WrongType
        return dict(value)
    return _scalar(value, tp)


def _first(value: Any, options: tuple[Any, ...]) -> Any:
    """`value` as the first type that it already has, else as the first it converts to. `off` is null where allowed."""
    if value is False and bool not in options and type(None) in options:
        return None
    for tp in options:
        if isinstance(tp, type) and type(value) is tp:
            return value
    for tp in options:
        try:
            return coerce(value, tp)
        except WrongType:
            continue
    raise WrongType


def _scalar(value: Any, tp: type) -> Any:
    if tp is type(None):
        if value is None or value in ("null", "none", "None", "~"):
            return None
    elif tp is bool:
        if isinstance(value, bool):
            return value
        if isinstance(value, str) and value.lower() in TRUE + FALSE:
            return value.lower() in TRUE
    elif tp is str:
        if isinstance(value, str):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            return str(value)
    elif tp in (int, float) and not isinstance(value, bool):
        if tp is int and isinstance(value, int):
            return value
        try:
            number = float(value) if isinstance(value, int | float | str) else None
        except (ValueError, OverflowError):  # the second: an int beyond a float's range
            number = None
        if number is not None and (tp is float or number.is_integer()):
            return tp(number)
    raise WrongType
