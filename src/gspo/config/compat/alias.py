"""How another system's key is declared: as an alias of ours, as one without effect, or as one with fixed values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Convert = Callable[[Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Alias:
    """Another system's name for our key `target`.

    `convert` turns the value into several keys or another value. `deferred` explains an alias whose meaning depends on
    the final values of other keys; `gspo.config.loading.derive` applies it.
    """

    name: str
    system: str
    target: str
    convert: Convert | None = None
    deferred: str = ""
    is_switch: bool = False  # as a flag it needs no value

    @property
    def doc(self) -> str:
        """How the alias's value differs from the key's; empty when it does not."""
        return self.deferred or (self.convert and self.convert.__doc__) or ""

    def apply(self, value: Any) -> Mapping[str, Any]:
        """Our keys and values for a value of this alias. ValueError says what was expected."""
        return self.convert(value) if self.convert else {self.target: value}


@dataclass(frozen=True, slots=True)
class Fixed:
    """Another system's key that can have only these values here; null is always one of them.

    They ask for what happens anyway. `remedy` says what to do about any other.
    """

    values: tuple[Any, ...]
    remedy: str
