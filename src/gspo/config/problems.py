"""What can be wrong with a configuration, and how it is said: key, value, origin, message, remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Problem:
    """One complaint. `origin` says where the value came from: a file and line, a flag, a recipe or the default."""

    level: Literal["error", "warning"]
    key: str
    value: Any
    origin: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        shown = (
            ""
            if self.value is None
            else f" = {self.value!r}"
            if isinstance(self.value, str)
            else f" = {self.value}"
        )
        source = f" ({self.origin})" if self.origin else ""
        remedy = f"\n    remedy: {self.remedy}" if self.remedy else ""
        return f"{self.level}: {self.key}{shown}{source}: {self.message}{remedy}"


class ConfigErrors(ValueError):
    """Every error of a configuration at once. `problems` holds them; warnings come along."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        self.errors = tuple(p for p in problems if p.level == "error")
        super().__init__("\n".join(str(p) for p in self.problems))
