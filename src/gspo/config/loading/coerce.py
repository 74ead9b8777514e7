"""Values as typed: checks a value against a key's type and converts what can be meant only one way."""

from __future__ import annotations

import types
import typing
from typing import Any

TRUE, FALSE = ("true", "yes", "on"), ("false", "no", "off")


class WrongType(Exception):
    """The value cannot be read as the type."""


def coerce(value: Any, tp: Any) -> Any:
    """`value` as `tp`, or WrongType. "1e-4" is a float, 3 is a float too, 3.0 an int, "true" a bool; 2.5 is no int."""
    if tp is Any:
        return value
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if origin in (types.UnionType, typing.Union):
        return _first(value, args)
    if origin is list:
        if not isinstance(value, list | tuple):
            raise WrongType
        return [coerce(v, args[0]) for v in value]
    if origin is dict:
        if not isinstance(value, dict):
            raise WrongType
        return dict(value)
    return _scalar(value, tp)


def _first(value: Any, options: tuple[Any, ...]) -> Any:
    """The first option that fits as it is, else the first that fits by conversion. `off` means null where it may."""
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
        try:
            number = float(value) if isinstance(value, int | float | str) else None
        except ValueError:
            number = None
        if number is not None and (tp is float or number.is_integer()):
            return tp(value) if isinstance(value, int) else tp(number)
    raise WrongType
