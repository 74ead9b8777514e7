"""How a configuration section is declared: `@section` classes whose fields are made by `key`."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class KeyInfo:
    """What is known about a key beside its type and default: one line of doc and the values allowed.

    `choices` are those of its `Literal` type; only a key that is `open` to further names lists them itself.
    """

    doc: str
    choices: tuple[Any, ...] = ()
    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None
    unit: str = ""
    open: bool = False  # users may register further choices
    may_change_on_resume: bool = False  # changes what is shown or kept, or where a step runs; not its result

    def complaint(self, value: Any) -> str | None:
        """Why `value` is not allowed, or None. The type has been checked before."""
        if value is None:
            return None
        wrong = [
            v
            for v in (value if isinstance(value, list) else [value])
            if self.choices and v not in self.choices
        ]
        if wrong:
            return f"expected {'only ' if isinstance(value, list) else 'one of '}{', '.join(map(str, self.choices))}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if not math.isfinite(value):
            return "expected a finite number"
        bounds = (
            (self.ge, "at least"),
            (self.gt, "greater than"),
            (self.le, "at most"),
            (self.lt, "less than"),
        )
        held = (
            self.ge is None or value >= self.ge,
            self.gt is None or value > self.gt,
            self.le is None or value <= self.le,
            self.lt is None or value < self.lt,
        )
        broken = [
            f"{word} {bound:g}" for (bound, word), ok in zip(bounds, held) if not ok and bound is not None
        ]
        return f"expected {' and '.join(broken)}" if broken else None


def key(
    *,
    default: Any = dataclasses.MISSING,
    doc: str,
    factory: Callable[[], Any] | None = None,
    built_in: Iterable[str] = (),
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
    unit: str = "",
    may_change_on_resume: bool = False,
) -> Any:
    """A dataclass field that documents itself: default (or factory), one line of doc, bounds.

    Fixed choices are the field's type, a `Literal`. `built_in` names leave it open: users may register more.
    """
    choices = tuple(built_in)
    info = KeyInfo(doc, choices, ge, gt, le, lt, unit, bool(choices), may_change_on_resume)
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata={"key": info})
    return dataclasses.field(default=default, metadata={"key": info})


class Section:
    """A part of the configuration. Remembers which fields were given, so that recipes fill in only the others."""

    def __setattr__(self, name: str, value: Any) -> None:
        fields = [f.name for f in dataclasses.fields(self)]  # pyright: ignore[reportArgumentType]
        if name not in fields:
            raise AttributeError(_unknown(type(self).__name__, name, fields))
        object.__setattr__(self, name, value)
        self.__dict__.setdefault("_given", set()).add(name)


def given(part: Section) -> frozenset[str]:
    """Names of the fields that were passed to the constructor or assigned later."""
    return frozenset(part.__dict__.get("_given", ()))


def as_default(part: T, except_for: Iterable[str] = ()) -> T:
    """`part` with none of its fields, or only those named, counted as given."""
    part.__dict__["_given"] = set(except_for)
    return part


@dataclass_transform(field_specifiers=(key,))
def section(cls: type[T]) -> type[T]:
    """Class decorator: a dataclass whose unknown keyword arguments are refused with the nearest name."""
    made: Any = dataclass(cls)
    plain_init = made.__init__
    names = [f.name for f in dataclasses.fields(made)]

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name not in names:
                raise TypeError(_unknown(made.__name__, name, names))
        plain_init(self, *args, **kwargs)
        self.__dict__["_given"] = set(names[: len(args)]) | set(kwargs)

    made.__init__ = __init__
    return made


def _unknown(owner: str, name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(known)}"
    return f"{owner} has no field {name!r}{hint}"
