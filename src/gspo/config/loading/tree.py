"""The schema as a flat table: dotted key → type, default, documentation."""

from __future__ import annotations

import dataclasses
import functools
import operator
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from gspo.config.schema import TrainerConfig
from gspo.config.schema.fields import KeyInfo, Section


@dataclass(frozen=True, slots=True)
class Leaf:
    """A key with a value. Of a `Literal`, `type` is the type of its values and `info.choices` are the values."""

    key: str
    type: Any
    default: Any
    info: KeyInfo

    @property
    def is_mapping(self) -> bool:
        return typing.get_origin(self.type) is dict

    @property
    def type_name(self) -> str:
        return type_name(self.type)


def type_name(tp: Any) -> str:
    """The type as a user reads it: `int or null`, `list of str`."""
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(type_name(a) for a in args)
    if origin is list:
        return f"list of {type_name(args[0])}".replace("mapping", "mappings")
    if origin is dict:
        return "mapping"
    return "null" if tp is type(None) else getattr(tp, "__name__", str(tp))


def _walk(cls: type, prefix: str, instance: Any) -> Iterator[Leaf | tuple[str, type]]:
    """Every leaf, and every section as (its key, its class), in the order of the schema."""
    hints = typing.get_type_hints(cls)
    for f in dataclasses.fields(cls):
        name, tp, value = f"{prefix}{f.name}", hints[f.name], getattr(instance, f.name)
        if isinstance(tp, type) and issubclass(tp, Section):
            yield name, tp
            yield from _walk(tp, f"{name}.", value)
        else:
            info: KeyInfo = f.metadata["key"]
            info = dataclasses.replace(info, choices=info.choices or _choices(tp))
            yield Leaf(name, _without_literals(tp), value, info)


def _choices(tp: Any) -> tuple[Any, ...]:
    """The values of a `Literal`, also inside a list or beside None; () for other types."""
    args = typing.get_args(tp)
    if typing.get_origin(tp) is Literal:
        return args
    parts = [part for part in args if part is not type(None)]
    return _choices(parts[0]) if len(parts) == 1 else ()


def _without_literals(tp: Any) -> Any:
    """The type with every `Literal` replaced by the type of its values."""
    origin, args = typing.get_origin(tp), typing.get_args(tp)
    if origin is Literal:
        return type(args[0])
    if origin in (types.UnionType, typing.Union):
        return functools.reduce(operator.or_, map(_without_literals, args))
    return types.GenericAlias(list, _without_literals(args[0])) if origin is list else tp


@cache
def leaves() -> dict[str, Leaf]:
    """Every key of the schema that has a value, in the order of the schema."""
    return {item.key: item for item in _walk(TrainerConfig, "", TrainerConfig()) if isinstance(item, Leaf)}


@cache
def sections() -> dict[str, type]:
    """Every key that is a section, with its class."""
    return dict(item for item in _walk(TrainerConfig, "", TrainerConfig()) if isinstance(item, tuple))


def leaf_of(name: str) -> Leaf | None:
    """The leaf with this name, or the mapping that `name` lies in, or None."""
    table = leaves()
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        leaf = table.get(".".join(parts[:end]))
        if leaf is not None:
            return leaf if end == len(parts) or leaf.is_mapping else None
    return None


def get(config: Any, name: str) -> Any:
    """The value of a dotted key in a config tree."""
    return operator.attrgetter(name)(config)


def put(config: Any, name: str, value: Any) -> None:
    """Set a dotted key in a config tree."""
    parent, _, last = name.rpartition(".")
    setattr(get(config, parent) if parent else config, last, value)
