"""One run as its folder shows it at one moment."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from gspo.processes import is_alive
from gspo.runs import reading, stats
from gspo.runs.metric_names import accuracy_interval, held_out_accuracy, is_accuracy

RUNNING_WINDOW = 90.0  # seconds since the last metric row in which a run on another machine counts as running
READ_NAMES = (
    "metrics.jsonl",
    "config.yaml",
    "config.json",
    "environment.json",
    "result.json",
    "alarms.jsonl",
    ".lock",
    "evals",
    "groups",
)


@dataclass(frozen=True)
class Run:
    """The content of a run folder, except groups and evaluations, which are read step by step."""

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
        """A metric, one value per row, None where the row has none."""
        return [_number(row.get(name)) for row in self.rows]

    def values(self, name: str) -> list[float]:
        """The values of a metric in the rows that have it."""
        return [v for v in self.column(name) if v is not None]

    def names(self) -> list[str]:
        """Every metric that occurs in some row, in order of appearance."""
        return list(dict.fromkeys(name for row in self.rows for name in row if name != "step"))

    def total(self, name: str) -> float | None:
        """The sum of a metric over the rows, None when no row has it."""
        values = self.values(name)
        return sum(values) if values else None

    def last(self, name: str) -> float | None:
        """The latest value of a metric, None when no row has it."""
        return next(reversed(self.values(name)), None)

    def given(self, argument: str) -> str | None:
        """What a Python argument (`train_dataset`, `val_dataset`, `reward_fn`) put in the place of the config's own."""
        return ((self.environment or {}).get("inputs") or {}).get(argument)

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
        """The last evaluation compared with the first, over the same questions."""
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
        return accuracy_interval(rows[0 if at == "start" else -1]) if rows else None


def read_run(path: Path | str) -> Run:
    """Read a run folder as it is now; missing or half-written files are no error."""
    path = Path(path)
    rows = reading.read_rows(path / "metrics.jsonl")
    result = reading.read_json(path / "result.json")
    return Run(
        path=path,
        rows=rows,
        config=reading.read_config(path),
        environment=reading.read_json(path / "environment.json"),
        result=result,
        alarms=[a for a in reading.json_lines(reading.read_text(path / "alarms.jsonl")) if "text" in a],
        status=status_of(path, rows, result),
    )


def is_run(path: Path) -> bool:
    """Whether a folder looks like a run folder."""
    return path.is_dir() and any((path / name).is_file() for name in ("metrics.jsonl", "config.yaml"))


def find_runs(folder: Path) -> Iterator[Path]:
    """The run folders directly under a folder, newest first.

    A run is left out when it, or one of its files that would be read, is a symlink to a place outside the folder.
    """
    try:
        root, entries = folder.resolve(), list(folder.iterdir())
    except OSError:
        return
    inside = [p for p in entries if not p.name.startswith(".") and p.resolve().parent == root and is_run(p)]
    inside = [p for p in inside if all((p / name).resolve().is_relative_to(root) for name in READ_NAMES)]
    yield from sorted(inside, key=lambda p: (-_changed(p), p.name))


def _changed(path: Path) -> float:
    """When the metrics or the config were last written."""
    times = [0.0]
    for name in ("metrics.jsonl", "config.yaml"):
        with contextlib.suppress(OSError):
            times.append((path / name).stat().st_mtime)
    return max(times)


def status_of(path: Path, rows: list[dict[str, Any]], result: dict[str, Any] | None) -> str:
    """`finished`, `running` or `stopped`. Does not try the lock: that could make a starting trainer fail."""
    steps = _number((result or {}).get("steps"))
    if result is not None and (steps is None or not rows or rows[-1]["step"] <= steps):
        return "finished"
    holder = reading.read_text(path / ".lock").strip()
    if holder.isdecimal() and len(holder) < 10 and is_alive(int(holder)):
        return "running"
    return "running" if time.time() - _changed(path) < RUNNING_WINDOW and rows and not holder else "stopped"


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
