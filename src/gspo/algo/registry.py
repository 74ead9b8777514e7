"""Names to implementations, with an error that suggests the nearest name."""

from __future__ import annotations

import difflib
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Registry(Generic[Item]):
    """A table of named implementations of one kind; a name is taken once."""

    def __init__(self, key: str) -> None:
        self.key = key
        self._items: dict[str, Item] = {}

    def add(self, name: str, item: Item) -> None:
        if name in self._items:
            raise ValueError(f"{self.key}={name!r} is already registered; choose another name")
        self._items[name] = item

    def get(self, name: str) -> Item:
        if name not in self._items:
            close = difflib.get_close_matches(name, self._items, n=1)
            hint = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(
                f"{self.key}={name!r} is unknown: {hint}known names are {', '.join(self.names())}"
            )
        return self._items[name]

    def names(self) -> tuple[str, ...]:
        return tuple(self._items)
