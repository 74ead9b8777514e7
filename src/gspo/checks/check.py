"""One check of the installed program: its name, whether it passed, and the numbers behind that."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of a check. `part` is technical, dynamics, improvement or clip ranges."""

    part: str
    name: str
    passed: bool
    detail: str

    def line(self) -> str:
        return f"  {'ok' if self.passed else 'FAILED'}  {self.name}: {self.detail}"


# A check function returns whether it passed and the numbers behind that.
Verdict = tuple[bool, str]


def run_checks(part: str, checks: Mapping[str, Callable[..., Verdict]], *subject: Any) -> Iterator[Check]:
    """Every check of a subject in turn; one that raises has failed, with its error as the detail."""
    for name, function in checks.items():
        try:
            passed, detail = function(*subject)
        except Exception as error:
            passed, detail = False, f"{type(error).__name__}: {error}"
        yield Check(part, name, bool(passed), detail)
