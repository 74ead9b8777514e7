"""Filtered groups held back in case a step has to train on them after all (`on_limit: keep_unfiltered`)."""

from __future__ import annotations

from gspo.types import Group

Filtered = tuple[Group, str]  # a group and why it was filtered


class Reserve:
    """Holds the earliest `size` groups of those added, give or take; memory does not grow with a long step."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: list[Filtered] = []

    def add(self, group: Group, reason: str) -> list[Filtered]:
        """Hold a group; returns those that are no longer of use."""
        self._held.append((group, reason))
        if len(self._held) < 2 * self._size:
            return []
        earliest = self.take(self._size)
        rest, self._held = self._held, earliest
        return rest

    def take(self, count: int) -> list[Filtered]:
        """Remove and return the `count` earliest by submission."""
        self._held.sort(key=lambda item: item[0].submission)
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def clear(self) -> list[Filtered]:
        """Remove and return all."""
        held, self._held = self._held, []
        return held
