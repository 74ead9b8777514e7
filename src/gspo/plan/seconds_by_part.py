"""Seconds by what they are spent on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping


class SecondsByPart(dict[str, float]):
    """Seconds by the name of what they are spent on."""

    @property
    def total(self) -> float:
        return sum(self.values())

    @property
    def largest(self) -> str:
        """The name with the most seconds."""
        return max(self, key=lambda name: self[name])

    def add(self, other: Mapping[str, float], times: float = 1.0) -> None:
        """Add the seconds of `other`, multiplied by `times`."""
        for name, seconds in other.items():
            self[name] = self.get(name, 0.0) + seconds * times

    @staticmethod
    def sum(parts: Iterable[Mapping[str, float]]) -> SecondsByPart:
        total = SecondsByPart()
        for part in parts:
            total.add(part)
        return total

    def times(self, factor: float) -> SecondsByPart:
        return SecondsByPart({name: seconds * factor for name, seconds in self.items()})

    def ranked(self) -> list[tuple[str, float]]:
        """Largest first, without those that take no time."""
        return sorted(((n, s) for n, s in self.items() if s > 0), key=lambda item: -item[1])
