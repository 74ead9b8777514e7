"""What a file of another system sets: settings with their lines, and what cannot be known without running it."""

from __future__ import annotations

from dataclasses import dataclass, field

from gspo.config.loading.settings import Setting


@dataclass
class Found:
    """The settings of a file, whose system's program it is for, and the lines whose values are not in the file."""

    settings: list[Setting] = field(default_factory=list)
    system: str | None = None
    unknown: list[str] = field(default_factory=list)
