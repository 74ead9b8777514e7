"""One check of the installed program: what was looked at, whether it held, and the numbers seen."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of a check. `part` is technical, dynamics, improvement or clip ranges."""

    part: str
    name: str
    passed: bool
    detail: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def line(self) -> str:
        return f"  {'ok' if self.passed else 'FAILED'}  {self.name}: {self.detail}"


# What a check function gives: (whether it holds, what was seen).
Verdict = tuple[bool, str]


def run_checks(part: str, checks: dict[str, Callable[[], Verdict]]) -> Iterator[Check]:
    """Every check in turn; one that raises has failed, with its error as the detail."""
    for name, function in checks.items():
        try:
            passed, detail = function()
        except Exception as error:
            passed, detail = False, f"{type(error).__name__}: {error}"
        yield Check(part, name, bool(passed), detail)
