"""The run folder: `runs/<name>/` with config, environment, metrics, groups, evaluations and checkpoints."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from gspo.runs.files import sync_file, write_atomic, write_json

SYNC_SECONDS = 1.0  # between two syncs of metric rows


class RunLocked(RuntimeError):
    """Another process writes to this run."""


class RunFolder:
    """The files of one run. `open` locks it for this process until `close` or its end; reading needs no lock."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.checkpoints = self.path / "checkpoints"
        self.groups = self.path / "groups"
        self.evals = self.path / "evals"
        self.metrics_file = self.path / "metrics.jsonl"
        self.config_file = self.path / "config.yaml"
        self.settings_file = self.path / "config.json"
        self.environment_file = self.path / "environment.json"
        self.result_file = self.path / "result.json"
        self._lock: TextIO | None = None
        self._synced = -math.inf  # when the metrics were synced

    @property
    def name(self) -> str:
        return self.path.name

    def open(self) -> RunFolder:
        """Make the folder and lock it for this process."""
        for folder in (self.path, self.checkpoints, self.groups, self.evals):
            folder.mkdir(parents=True, exist_ok=True)
        lock = open(self.path / ".lock", "a+")  # noqa: SIM115 - held until close()
        if not _try_lock(lock):
            lock.seek(0)
            holder = lock.read().strip() or "unknown"
            lock.close()
            raise RunLocked(
                f"{self.path} is in use by process {holder}; "
                "wait for it, or give this run another trainer.experiment_name"
            )
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock
        return self

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove_if_empty(self) -> None:
        """Delete a folder to which nothing was written: a start that was refused leaves no trace."""
        if any(p.is_file() and p.name != ".lock" for p in self.path.rglob("*")):
            return
        shutil.rmtree(self.path, ignore_errors=True)

    def locked(self) -> bool:
        """Whether some process holds the lock now."""
        try:
            with open(self.path / ".lock") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except FileNotFoundError:
            return False
        except OSError:
            return True
        return False

    def append_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Append the row of one step. A number that is not finite is stored as null.

        Rows are synced as they come, but at most once per second: a sync may take longer than a short step.
        """
        row = {"step": step, **{k: v if math.isfinite(v) else None for k, v in values.items()}}
        with open(self.metrics_file, "a", encoding="utf-8") as f:
            f.write(json.dumps(row) + "\n")
        if time.monotonic() - self._synced >= SYNC_SECONDS:
            self.sync_metrics()

    def sync_metrics(self) -> None:
        """Make all rows durable, as before a checkpoint that follows them."""
        if self.metrics_file.exists():
            sync_file(self.metrics_file)
        self._synced = time.monotonic()

    def amend_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Add values to the row of a step that is already written."""
        rows = [row | dict(values) if row["step"] == step else row for row in self.rows()]
        self._rewrite(rows)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Metric rows in order, up to a line that is half written."""
        with contextlib.suppress(FileNotFoundError), open(self.metrics_file, encoding="utf-8") as f:
            for line in f:
                try:
                    yield json.loads(line)
                except json.JSONDecodeError:
                    return

    def cut_after(self, step: int) -> int:
        """Delete rows, groups and evaluations of steps after `step`; returns how many rows were deleted."""
        rows = list(self.rows())
        kept = [row for row in rows if row["step"] <= step]
        if self.metrics_file.exists():
            self._rewrite(kept)
        for file in (*self.groups.glob("step-*.jsonl.gz"), *self.evals.glob("step-*.jsonl.gz")):
            if step_of(file.name) > step:
                file.unlink()
        return len(rows) - len(kept)

    def _rewrite(self, rows: list[dict[str, Any]]) -> None:
        write_atomic(self.metrics_file, "".join(json.dumps(row) + "\n" for row in rows).encode())

    def write_environment(self, environment: Mapping[str, Any]) -> None:
        write_json(self.environment_file, environment)

    def result(self) -> dict[str, Any] | None:
        """The result of a finished run, None while it is unfinished."""
        try:
            return json.loads(self.result_file.read_text())
        except FileNotFoundError:
            return None


def _try_lock(lock: TextIO) -> bool:
    """Whether the lock was acquired. Tries for 0.2 s: `locked` of another process holds it for an instant."""
    for _ in range(20):
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            time.sleep(0.01)
    return False


def step_of(name: str) -> int:
    """The step number in `step-000012…`; -1 for other names."""
    match = re.match(r"step-(\d+)", name)
    return int(match.group(1)) if match else -1
