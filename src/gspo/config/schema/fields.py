"""How a configuration section is declared: a subclass of `Section` whose fields are made by `key`."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """What is known about a key besides its type and default: its documentation and the allowed values.

    `choices` come from the key's `Literal` type. Only a key that is `open` to further names lists them itself.
    """

    doc: str
    choices: tuple[Any, ...] = ()
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    unit: str = ""
    example: str = ""  # a value as it is typed, for keys whose default shows no shape
    open: bool = False  # users may register further choices
    auto: bool = False  # adapted to the data, the device and the memory unless somebody sets it; `auto` leaves it so
    may_change_on_resume: bool = False  # affects what is shown or kept, or where a step runs; not its result

    def violation(self, value: Any) -> str | None:
        """What was expected instead of `value`, or None when it is allowed. The type has been checked before."""
        if value is None:
            return None
        values = value if isinstance(value, list) else [value]
        if self.choices and any(v not in self.choices for v in values):
            return f"expected {'only ' if isinstance(value, list) else 'one of '}{', '.join(map(str, self.choices))}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if isinstance(value, float) and not math.isfinite(value):
            return "expected a finite number"
        bounds = (
            (self.ge, operator.ge, "of at least"),
            (self.gt, operator.gt, "greater than"),
            (self.le, operator.le, "of at most"),
            (self.lt, operator.lt, "less than"),
        )
        broken = [f"{word} {bound:g}" for bound, holds, word in bounds if bound is not None and not holds(value, bound)]
        return f"expected a number {' and '.join(broken)}" if broken else None


def key(
    *,
    default: Any = dataclasses.MISSING,
    factory: Callable[[], Any] | None = None,
    built_in: Iterable[str] = (),
    **info: Any,
) -> Any:
    """A dataclass field that documents itself: default or factory, and the fields of KeyInfo.

    Fixed choices are the field's type, a `Literal`. `built_in` names leave it open: users may register more.
    """
    choices = tuple(built_in)
    metadata = {"key": KeyInfo(choices=choices, open=bool(choices), **info)}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


@dataclass_transform(field_specifiers=(key,))
class Section:
    """A part of the configuration. Subclasses are dataclasses that refuse unknown names and suggest the nearest one.

    A section remembers which fields were set explicitly; recipes fill in only the others.
    """

    def __init_subclass__(cls) -> None:
        plain_init = dataclass(cls).__init__
        names = _names(cls)

        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
            for name in kwargs:
                if name not in names:
                    raise TypeError(_unknown(cls, name))
            plain_init(self, *args, **kwargs)
            mark_explicit(self, [*names[: len(args)], *kwargs])

        cls.__init__ = __init__

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _names(type(self)):
            raise AttributeError(_unknown(type(self), name))
        object.__setattr__(self, name, value)
        self.__dict__.setdefault("_explicit", set()).add(name)


def _names(cls: type) -> list[str]:
    return [f.name for f in dataclasses.fields(cls)]


def _unknown(cls: type, name: str) -> str:
    known = _names(cls)
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; its fields are {', '.join(known)}"
    return f"{cls.__name__} has no field {name!r}{hint}"


def explicit_fields(part: Section) -> frozenset[str]:
    """Names of the fields that were passed to the constructor or assigned later."""
    return frozenset(part.__dict__.get("_explicit", ()))


def mark_explicit(part: T, names: Iterable[str]) -> T:
    """Count exactly the fields `names` of `part` as set explicitly, and all others as defaults. Returns `part`."""
    part.__dict__["_explicit"] = set(names)
    return part
