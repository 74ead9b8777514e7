"""What the dashboard knows: runs and group indexes, read again only when their files change."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gspo.report.group_index import index_step
from gspo.report.overview import overview
from gspo.report.verdict import start_and_end
from gspo.runs import reading
from gspo.runs.run import READ_NAMES, Run, find_runs, read_run, status_of

WATCHED = tuple(name for name in READ_NAMES if name != "groups")
SPARK_POINTS = 60
BATCH_SECONDS = 0.25  # how long one request may index files before it answers with what it has

Key = tuple[int, str]  # step and kind, which is train or eval
Stamp = tuple[int, int]


def stamp(path: Path) -> Stamp:
    """Size and time of a file: the same stamp means the same content."""
    try:
        info = path.stat()
    except OSError:
        return (-1, 0)
    return info.st_size, info.st_mtime_ns


@dataclass
class IndexCache:
    """The index entries of one run in the order of reading, each with the stamp of its file.

    `generation` changes when a file that was read has changed or is gone.
    """

    entries: dict[Key, tuple[Stamp, dict[str, Any]]] = field(default_factory=dict)
    generation: int = 1
    lock: threading.Lock = field(default_factory=threading.Lock)

    def forget_changed(self, files: dict[Key, Path]) -> None:
        """Drop the entries of steps that were written again (after a resume) or removed; pages then start over."""
        current = {k: e for k, e in self.entries.items() if k in files and stamp(files[k]) == e[0]}
        if len(current) < len(self.entries):
            self.entries, self.generation = current, self.generation + 1

    def read_new(self, files: dict[Key, Path]) -> bool:
        """Read files that have no entry yet, for a short while; returns whether all have one now."""
        deadline = time.monotonic() + BATCH_SECONDS
        for key in sorted(files.keys() - self.entries.keys()):
            (step, kind), seen = key, stamp(files[key])
            groups = index_step(reading.read_groups(files[key], numbers=False), kind == "eval")
            self.entries[key] = seen, {"step": step, "kind": kind, **groups}
            if time.monotonic() > deadline:
                break
        return len(self.entries) == len(files)


class LiveRuns:
    """The runs under one folder. Safe to call from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._runs: dict[str, tuple[tuple[Stamp, ...], Run]] = {}
        self._indexes: dict[str, IndexCache] = {}
        self._lock = threading.Lock()

    def paths(self) -> Iterator[Path]:
        return find_runs(self.folder)

    def path(self, name: str) -> Path | None:
        """The folder of a run by name; None for a name that is not a run directly in the folder."""
        return next((p for p in self.paths() if p.name == name), None)

    def run(self, path: Path) -> Run:
        """The run as it is now: files are read again when they changed, the status is always fresh."""
        now = _stamps(path)
        with self._lock:
            held = self._runs.get(path.name)
        if held and held[0] == now:
            run, status = held[1], status_of(path, held[1].rows, held[1].result)
            run = run if run.status == status else replace(run, status=status)
        else:
            run = read_run(path)
        with self._lock:
            self._runs[path.name] = (now, run)
        return run

    def overview(self, path: Path, after: int = 0, epoch: int = 0) -> dict[str, Any]:
        """The overview with the metric rows after the first `after`, which the page has; all rows after a replacement.

        The last row that a page has is sent again: an evaluation adds to the row of its step.
        """
        out = overview(self.run(path))
        out["epoch"] = _epoch(path / "metrics.jsonl")
        known = after if epoch == out["epoch"] and after <= len(out["columns"]["step"]) else 0
        out["offset"] = max(0, known - 1)
        out["columns"] = {name: values[out["offset"] :] for name, values in out["columns"].items()}
        return out

    def tag(self, path: Path) -> str:
        """Changes whenever the run's overview may have changed."""
        return f"{hash((_stamps(path), self.run(path).status)) & 0xFFFFFFFFFFFF:x}"

    def summaries(self) -> list[dict[str, Any]]:
        """One entry per run, for the list of runs."""
        return [summary(self.run(path)) for path in self.paths()]

    def index(self, path: Path, after: int, generation: int) -> dict[str, Any]:
        """Index entries after the first `after`, which the page has; reads new files for a short while, then answers.

        `complete` is False when files remain: the page asks again.
        """
        with self._lock:
            cache = self._indexes.setdefault(path.name, IndexCache())
        with cache.lock:
            files = {(step, "train"): file for step, file in reading.step_files(path / "groups").items()}
            files |= {(step, "eval"): file for step, file in reading.step_files(path / "evals").items()}
            cache.forget_changed(files)
            complete = cache.read_new(files)
            start = after if generation == cache.generation else 0
            entries = [entry for _, entry in list(cache.entries.values())[start:]]
            return {"entries": entries, "complete": complete, "generation": cache.generation}


def summary(run: Run) -> dict[str, Any]:
    """What the list of runs shows about a run."""
    ends = start_and_end(run)
    rewards = run.values("critic/score_all/mean") or run.values("critic/score/mean")
    stride = max(1, len(rewards) // SPARK_POINTS)
    return {
        "name": run.name,
        "status": run.status,
        "last_step": run.last_step,
        "total_steps": run.setting("trainer.total_training_steps"),
        "accuracy": run.accuracy[-1][1] if run.accuracy else None,
        "start_accuracy": ends[0] if ends else None,
        "curve": rewards[::-stride][::-1],
        "seconds": run.seconds,
        "alarms": len(run.alarms),
    }


def _stamps(path: Path) -> tuple[Stamp, ...]:
    return tuple(stamp(path / name) for name in WATCHED)


def _epoch(path: Path) -> int:
    """The identity of the file: rows are appended to it, and cutting rows off replaces it by another file."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0
