"""The list of mutants, read from `rooms/*.toml`."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = Path(__file__).parent / "rooms"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One wrong edit of a source file and the tests that must notice it."""

    room: str
    name: str
    file: str  # below src/gspo
    find: str
    replace: str
    tests: tuple[str, ...]  # below tests/
    survives: str | None = None  # why no test can be expected to notice it

    @property
    def path(self) -> str:
        """The source file below the root of the repository."""
        return f"src/gspo/{self.file}"

    def apply(self, root: Path) -> str:
        """The text of the source file below `root` with the edit; a ValueError unless `find` occurs exactly once."""
        text = (root / self.path).read_text(encoding="utf-8")
        if (count := text.count(self.find)) != 1:
            raise ValueError(
                f"{self.room}: {self.name}: the snippet occurs {count} times in {self.path}; expected once"
            )
        return text.replace(self.find, self.replace)


def read_mutants(folder: Path = ROOMS) -> list[Mutant]:
    """Every mutant of every room, in the order of the files."""
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        default = data.pop("tests", [])
        for entry in data.pop("mutant"):
            tests = tuple(entry.pop("tests", default))
            mutants.append(Mutant(room=path.stem, tests=tests, **entry))
        if data:
            raise ValueError(f"{path.name}: unknown keys {', '.join(data)}; expected tests and [[mutant]]")
    return mutants
