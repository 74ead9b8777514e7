"""Problems of a configuration and their text: key, value, origin, message, remedy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Problem:
    """One error or warning. `origin` is where the value came from: a file and line, a flag, a recipe, the default."""

    level: Literal["error", "warning"]
    key: str
    value: Any
    origin: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        text = repr(self.value) if isinstance(self.value, str) else str(self.value)
        shown = "" if self.value is None else f" = {text}"
        source = f" ({self.origin})" if self.origin else ""
        remedy = f"\n    remedy: {self.remedy}" if self.remedy else ""
        return f"{self.level}: {self.key}{shown}{source}: {self.message}{remedy}"


class ConfigErrors(ValueError):
    """All errors of a configuration at once. `problems` also has the warnings."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        self.errors = tuple(p for p in problems if p.level == "error")
        super().__init__("\n".join(str(p) for p in self.problems))
