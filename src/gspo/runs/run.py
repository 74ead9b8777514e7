"""One run as read from its folder at one moment."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gspo.processes import is_alive
from gspo.runs import reading, stats
from gspo.runs.metric_names import accuracy_interval, held_out_accuracy, is_accuracy

RUNNING_WINDOW = 90.0  # seconds since the last metric row in which a run of another machine counts as running


READ_NAMES = (
    "metrics.jsonl",
    "config.yaml",
    "environment.json",
    "result.json",
    "alarms.jsonl",
    ".lock",
    "evals",
    "groups",
)


@dataclass(frozen=True)
class Run:
    """What a run folder holds, apart from groups and evaluations, which are read a step at a time."""

    path: Path
    rows: list[dict[str, Any]] = field(default_factory=list)
    config: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    alarms: list[dict[str, Any]] = field(default_factory=list)
    status: str = "stopped"

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def last_step(self) -> int:
        return self.rows[-1]["step"] if self.rows else 0

    def column(self, name: str) -> list[float | None]:
        """A metric, one value a row, None where the row has none."""
        return [_number(row.get(name)) for row in self.rows]

    def names(self) -> list[str]:
        """Every metric that occurs in some row, in order of appearance."""
        seen: dict[str, None] = {}
        for row in self.rows:
            seen.update(dict.fromkeys(row))
        seen.pop("step", None)
        return list(seen)

    def total(self, name: str) -> float | None:
        """The sum of a metric over the rows, None when no row has it."""
        values = [v for v in self.column(name) if v is not None]
        return sum(values) if values else None

    def last(self, name: str) -> float | None:
        return next((v for v in reversed(self.column(name)) if v is not None), None)

    def setting(self, key: str) -> Any:
        """The value of a dotted config key, None when the run has no such key."""
        return self._settings.get(key)

    @cached_property
    def _settings(self) -> dict[str, Any]:
        return {leaf["key"]: leaf["value"] for leaf in self.config}

    def group_files(self) -> dict[int, Path]:
        return reading.step_files(self.path / "groups")

    def eval_files(self) -> dict[int, Path]:
        return reading.step_files(self.path / "evals")

    @cached_property
    def seconds(self) -> float | None:
        """Wall-clock seconds: the trainer's own count, else the sum of its steps."""
        value = _number((self.result or {}).get("seconds"))
        return self.total("timing_s/step") if value is None else value

    @cached_property
    def generated_tokens(self) -> float | None:
        value = _number((self.result or {}).get("generated_tokens"))
        return self.total("train/generated_tokens") if value is None else value

    @cached_property
    def accuracy(self) -> list[tuple[int, float]]:
        """Held-out accuracy by step, the mean over data sources."""
        found = [(row["step"], held_out_accuracy(row)) for row in self.rows]
        return [(step, value) for step, value in found if value is not None]

    @cached_property
    def change(self) -> stats.PairedDifference | None:
        """First against last evaluation over the same questions."""
        files = list(self.eval_files().values())
        if len(files) < 2:
            return None
        first, last = (stats.question_scores(reading.read_groups(f)) for f in (files[0], files[-1]))
        return stats.paired_by_question(first, last)[0]

    def interval(self, at: str) -> tuple[float, float] | None:
        """The 95 % interval of held-out accuracy at `start` or `final`, None when unknown."""
        stored = (self.result or {}).get(f"{at}_ci")
        if isinstance(stored, list) and len(stored) == 2 and all(_number(v) is not None for v in stored):
            return float(stored[0]), float(stored[1])
        rows = [row for row in self.rows if any(is_accuracy(k) for k in row)]
        if not rows:
            return None
        return accuracy_interval(rows[0] if at == "start" else rows[-1])


def read_run(path: Path | str) -> Run:
    """Read a run folder as it is now; never raises for missing or half-written files."""
    path = Path(path)
    rows = reading.read_rows(path / "metrics.jsonl")
    result = reading.read_json(path / "result.json")
    return Run(
        path=path,
        rows=rows,
        config=reading.read_config(path / "config.yaml"),
        environment=reading.read_json(path / "environment.json"),
        result=result,
        alarms=[a for a in reading.json_lines(reading.read_text(path / "alarms.jsonl")) if "text" in a],
        status=status_of(path, rows, result),
    )


def is_run(path: Path) -> bool:
    """Whether a folder looks like a run's."""
    return path.is_dir() and any((path / name).is_file() for name in ("metrics.jsonl", "config.yaml"))


def find_runs(folder: Path) -> Iterator[Path]:
    """The run folders directly under a folder that lie in it for real, newest first.

    A run is left out when it, or a file of it that would be read, is a symlink to somewhere outside the folder.
    """
    try:
        root, entries = folder.resolve(), list(folder.iterdir())
    except OSError:
        return
    inside = [p for p in entries if not p.name.startswith(".") and p.resolve().parent == root and is_run(p)]
    inside = [p for p in inside if all((p / name).resolve().is_relative_to(root) for name in READ_NAMES)]
    yield from sorted(inside, key=lambda p: (-_changed(p), p.name))


def _changed(path: Path) -> float:
    times = []
    for name in ("metrics.jsonl", "config.yaml"):
        try:
            times.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)


def status_of(path: Path, rows: list[dict[str, Any]], result: dict[str, Any] | None) -> str:
    """`finished`, `running` or `stopped`. The lock is never taken here: that could turn a starting trainer away."""
    steps = _number((result or {}).get("steps"))
    if result is not None and (steps is None or not rows or rows[-1]["step"] <= steps):
        return "finished"
    holder = reading.read_text(path / ".lock").strip()
    if holder.isdecimal() and len(holder) < 10 and is_alive(int(holder)):
        return "running"
    return "running" if time.time() - _changed(path) < RUNNING_WINDOW and rows and not holder else "stopped"


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
