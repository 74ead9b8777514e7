"""The working table of a load: canonical key → value and origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gspo.config.loading.sources import Layer, Origin


@dataclass(frozen=True, slots=True)
class Setting:
    """A value and where it came from."""

    value: Any
    origin: Origin


class Settings(dict[str, Setting]):
    """Every key of the schema with its current value and origin."""

    def explicit(self, key: str) -> bool:
        """Whether someone set the key, as opposed to a default or a recipe."""
        return self[key].origin.explicit

    def follow(self, key: str, value: Any, because: str) -> None:
        """Set a value that follows from others, saying why."""
        self[key] = Setting(value, Origin(Layer.DERIVED, because))
