"""One line of the scorecard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """The injected fault (`title`), whether the promise held, and the details."""

    id: str
    title: str
    passed: bool
    detail: str
    seconds: float = 0.0


Check = Callable[[int], Row]
"""A row's check, called with the seed that orders its faults."""
