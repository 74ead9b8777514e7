"""One run as its folder shows it at one moment."""

from __future__ import annotations

import contextlib
import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from gspo import untrusted
from gspo.processes import is_alive
from gspo.runs import reading, stats
from gspo.runs.metric_names import accuracy_interval, held_out_accuracy, is_accuracy
from gspo.runs.metric_table import MetricTable

T = TypeVar("T")

MAX_ALARM_TEXT = 10_000  # characters
RUNNING_WINDOW = 90.0  # seconds since the last metric row in which a run on another machine counts as running
READ_NAMES = (
    "metrics.jsonl",
    "config.yaml",
    "config.json",
    "environment.json",
    "result.json",
    "alarms.jsonl",
    "ancestry.json",
    ".lock",
    "evals",
    "groups",
)


@dataclass(frozen=True)
class Run:
    """The content of a run folder, except groups and evaluations, which are read step by step."""

    path: Path
    metrics: MetricTable = field(default_factory=MetricTable)
    config: list[dict[str, Any]] = field(default_factory=list)
    environment: dict[str, Any] | None = None
    result: dict[str, Any] | None = None
    alarms: list[dict[str, Any]] = field(default_factory=list)
    ancestry: dict[str, Any] | None = None  # of a branch: its parent, the step, and what differs
    status: str = "stopped"
    problems: tuple[str, ...] = ()  # files that were not read, each with the reason

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def last_step(self) -> int:
        return self.steps[-1] if self.steps else 0

    @property
    def steps(self) -> list[int]:
        """The steps of the metric rows, ascending."""
        return self.metrics.steps

    @property
    def rows(self) -> list[dict[str, Any]]:
        """The metric rows, each with its step and the numbers that it has."""
        return list(self.metrics.rows())

    @property
    def is_supervised(self) -> bool:
        """Whether it trains on the answers of a dataset: examples (`gspo sft`) or pairs (`gspo rm`)."""
        return bool(self.values("train/loss"))

    @property
    def is_reward_model(self) -> bool:
        """Whether it trains a reward model (`gspo rm`)."""
        return bool(self.values("train/sign_accuracy"))

    def column(self, name: str) -> list[float | None]:
        """A metric, one value per row, None where the row has none."""
        return self.metrics.column(name)

    def values(self, name: str) -> list[float]:
        """The values of a metric in the rows that have it."""
        return [v for v in self.metrics.numbers(name) if not math.isnan(v)]

    def names(self) -> list[str]:
        """Every metric that occurs in some row, in order of appearance."""
        return self.metrics.names()

    def total(self, name: str) -> float | None:
        """The sum of a metric over the rows, None when no row has it."""
        values = self.values(name)
        return sum(values) if values else None

    def last(self, name: str) -> float | None:
        """The latest value of a metric, None when no row has it."""
        return next(reversed(self.values(name)), None)

    def given(self, argument: str) -> str | None:
        """What a Python argument (`train_dataset`, `val_dataset`, `reward_fn`) put in the place of the config's own."""
        inputs = (self.environment or {}).get("inputs")
        value = inputs.get(argument) if isinstance(inputs, dict) else None
        return value if isinstance(value, str) else None

    def seen_questions(self) -> tuple[int, int] | None:
        """(held-out questions that are training rows too, all held-out questions); None when the run does not say."""
        facts = (self.environment or {}).get("held_out")
        if not isinstance(facts, dict) or not all(isinstance(v, int) for v in facts.values()):
            return None
        return facts.get("also_trained_on", 0), facts.get("questions", 0)

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
        columns = {name: self.metrics.numbers(name) for name in self.names() if is_accuracy(name)}
        out = []
        for place, step in enumerate(self.steps if columns else ()):
            value = held_out_accuracy({n: v for n, c in columns.items() if not math.isnan(v := c[place])})
            if value is not None:
                out.append((step, value))
        return out

    @cached_property
    def change(self) -> stats.PairedDifference | None:
        """The last evaluation compared with the first, over the same questions."""
        files = list(self.eval_files().values())
        if len(files) < 2:
            return None
        first, last = (stats.question_scores(reading.read_groups(f, numbers=False)) for f in (files[0], files[-1]))
        return stats.paired_by_question(first, last)[0]

    def interval(self, at: str) -> tuple[float, float] | None:
        """The 95 % interval of held-out accuracy at `start` or `final`, None when unknown."""
        stored = (self.result or {}).get(f"{at}_ci")
        if isinstance(stored, list) and len(stored) == 2 and all(_number(v) is not None for v in stored):
            return float(stored[0]), float(stored[1])
        if not self.accuracy:
            return None
        step = self.accuracy[0 if at == "start" else -1][0]
        return accuracy_interval(self.metrics.row(bisect_left(self.steps, step)))


def read_run(path: Path | str, metrics: MetricTable | None = None) -> Run:
    """Read a run folder as it is now. Missing or half-written files are no error; `problems` names what was refused.

    `metrics` is the table of an earlier call: only rows that were appended since are read.
    """
    path = Path(path)
    problems: list[str] = []

    def tried(read: Callable[[], T], otherwise: T) -> T:
        try:
            return read()
        except untrusted.Unreadable as error:
            problems.append(f"{error.path.name}: {error.reason}")
        except OSError as error:
            problems.append(f"{error.strerror}")
        return otherwise

    table = (metrics or MetricTable()).read(path / "metrics.jsonl")
    if table.problem:
        problems.append(f"metrics.jsonl: {table.problem}")
    result = tried(lambda: reading.read_object(path / "result.json"), None)
    return Run(
        path=path,
        metrics=table,
        config=tried(lambda: reading.read_config(path), []),
        environment=tried(lambda: reading.read_object(path / "environment.json"), None),
        result=result,
        alarms=[
            alarm | {"text": str(alarm["text"])[:MAX_ALARM_TEXT]}
            for alarm in tried(lambda: reading.read_lines(path / "alarms.jsonl", reading.MAX_ALARMS), [])
            if "text" in alarm
        ],
        ancestry=tried(lambda: reading.read_object(path / "ancestry.json"), None),
        status=status_of(path, table.steps, result),
        problems=tuple(problems),
    )


def is_run(path: Path) -> bool:
    """Whether a folder looks like a run folder."""
    return path.is_dir() and any(os.path.lexists(path / name) for name in ("metrics.jsonl", "config.yaml"))


def find_runs(folder: Path) -> Iterator[Path]:
    """The run folders directly under a folder, newest first.

    A run is left out when it, or one of its files that would be read, is a symlink to a place outside the folder.
    """
    try:
        root, entries = folder.resolve(), list(folder.iterdir())
    except OSError:
        return
    inside = [p for p in entries if not p.name.startswith(".") and _real(p).parent == root and is_run(p)]
    inside = [p for p in inside if all(_real(p / name).is_relative_to(root) for name in READ_NAMES)]
    yield from sorted(inside, key=lambda p: (-_changed(p), p.name))


def _real(path: Path) -> Path:
    """The path without symlinks. A loop of symlinks leads nowhere: it stays where it is, and cannot be read."""
    try:
        return path.resolve()
    except (OSError, RuntimeError):
        return path.parent.resolve() / path.name


def _changed(path: Path) -> float:
    """When the metrics or the config were last written."""
    times = [0.0]
    for name in ("metrics.jsonl", "config.yaml"):
        with contextlib.suppress(OSError):
            times.append((path / name).stat().st_mtime)
    return max(times)


def status_of(path: Path, steps: Sequence[int], result: dict[str, Any] | None) -> str:
    """`finished`, `running` or `stopped`. Does not try the lock: that could make a starting trainer fail."""
    total = _number((result or {}).get("steps"))
    if result is not None and (total is None or not steps or steps[-1] <= total):
        return "finished"
    try:
        holder = untrusted.read_text(path / ".lock", limit=4096).strip()
    except FileNotFoundError:
        holder = ""
    except (untrusted.Unreadable, OSError):
        holder = "unknown"
    if holder.isdecimal() and len(holder) < 10 and is_alive(int(holder)):
        return "running"
    return "running" if time.time() - _changed(path) < RUNNING_WINDOW and steps and not holder else "stopped"


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None
