"""Settings while a config is loaded: one setting with its origin, and the table of all keys."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Literal

from gspo.config.problems import Problem


class Layer(IntEnum):
    """Where a setting comes from. A later layer replaces an earlier one."""

    DEFAULT = 0
    RECIPE = 1
    DERIVED = 2
    FILE = 3
    PYTHON = 4
    FLAG = 5
    OVERRIDE = 6


@dataclass(frozen=True, slots=True)
class Origin:
    """The layer of a value, and the exact place as text: `run.yaml:3`, `flag --group_size`, `default`."""

    layer: Layer
    text: str

    @property
    def explicit(self) -> bool:
        """Whether a person set the value, as opposed to a default, a recipe or a consequence of other keys."""
        return self.layer >= Layer.FILE


@dataclass(frozen=True, slots=True)
class Setting:
    """A name, its value and its origin. `text` is the value as typed, when it comes from a command line."""

    name: str
    value: Any
    origin: Origin
    text: str | None = None

    def problem(self, message: str, remedy: str, level: Literal["error", "warning"] = "error") -> Problem:
        """What is wrong with this setting."""
        return Problem(level, self.name, self.value, self.origin.text, message, remedy)


class Settings(dict[str, Setting]):
    """Every key of the schema with its current value and origin."""

    def put(self, key: str, value: Any, origin: Origin) -> None:
        self[key] = Setting(key, value, origin)

    def derive(self, key: str, value: Any, reason: str) -> None:
        """Set a value that follows from other keys; `reason` becomes its origin."""
        self.put(key, value, Origin(Layer.DERIVED, reason))

    def explicit(self, key: str) -> bool:
        """Whether a person set the key."""
        return self[key].origin.explicit
