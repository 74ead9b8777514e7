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

Stamp = tuple[tuple[int, int], ...]


def stamp(path: Path) -> Stamp:
    """Size and time of a run's files: the same stamp means the same content."""
    out = []
    for name in WATCHED:
        try:
            info = (path / name).stat()
            out.append((info.st_size, info.st_mtime_ns))
        except OSError:
            out.append((-1, 0))
    return tuple(out)


@dataclass
class IndexCache:
    """The index of one run, step by step. `generation` changes when a file that was read has changed or gone."""

    entries: dict[tuple[int, str], dict[str, Any]] = field(default_factory=dict)
    stamps: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)
    order: list[tuple[int, str]] = field(default_factory=list)
    generation: int = 1
    lock: threading.Lock = field(default_factory=threading.Lock)


class LiveRuns:
    """The runs under one folder. Safe to call from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._runs: dict[str, tuple[Stamp, Run]] = {}
        self._indexes: dict[str, IndexCache] = {}
        self._lock = threading.Lock()

    def paths(self) -> Iterator[Path]:
        return find_runs(self.folder)

    def path(self, name: str) -> Path | None:
        """The folder of a run by name; None for a name that is not a run directly in the folder."""
        return next((p for p in self.paths() if p.name == name), None)

    def run(self, path: Path) -> Run:
        """The run as it is now: files are read again when they changed, the status is always fresh."""
        now = stamp(path)
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
        """The overview with metric rows beyond the `after` that a page holds, or all when the file was replaced."""
        out = overview(self.run(path))
        out["epoch"] = _epoch(path / "metrics.jsonl")
        rows = len(out["columns"]["step"])
        out["offset"] = after if epoch == out["epoch"] and after <= rows else 0
        # the last row a page holds may have been added to since: evaluations come as a second line of their step
        out["offset"] = max(0, out["offset"] - 1)
        out["columns"] = {name: values[out["offset"] :] for name, values in out["columns"].items()}
        return out

    def tag(self, path: Path) -> str:
        """Changes whenever the run's overview may have changed."""
        return f"{hash((stamp(path), self.run(path).status)) & 0xFFFFFFFFFFFF:x}"

    def summaries(self) -> list[dict[str, Any]]:
        """A line a run for the list of runs."""
        return [summary(self.run(path)) for path in self.paths()]

    def index(self, path: Path, after: int, generation: int) -> dict[str, Any]:
        """Index entries beyond the `after` that the page holds; reads new files for a short while, then answers.

        `complete` is False when files remain: the page asks again.
        """
        with self._lock:
            cache = self._indexes.setdefault(path.name, IndexCache())
        with cache.lock:
            files = {(s, "train"): p for s, p in reading.step_files(path / "groups").items()}
            files |= {(s, "eval"): p for s, p in reading.step_files(path / "evals").items()}
            self._forget_changed(cache, files)
            complete = self._read_new(cache, files)
            start = after if generation == cache.generation else 0
            entries = [cache.entries[key] for key in cache.order[start:]]
            return {"entries": entries, "complete": complete, "generation": cache.generation}

    def _forget_changed(self, cache: IndexCache, files: dict[tuple[int, str], Path]) -> None:
        """A step that was written again (after a resume) or cut away makes pages start over."""
        if all(key in files and _stat(files[key]) == cache.stamps[key] for key in cache.order):
            return
        cache.entries = {k: e for k, e in cache.entries.items() if k in files and _stat(files[k]) == cache.stamps[k]}
        cache.order = [k for k in cache.order if k in cache.entries]
        cache.generation += 1

    def _read_new(self, cache: IndexCache, files: dict[tuple[int, str], Path]) -> bool:
        deadline = time.monotonic() + BATCH_SECONDS
        for key in sorted(files.keys() - cache.entries.keys()):
            step, kind = key
            cache.stamps[key] = _stat(files[key])
            cache.entries[key] = {
                "step": step,
                "kind": kind,
                **index_step(reading.read_groups(files[key], numbers=False), kind == "eval"),
            }
            cache.order.append(key)
            if time.monotonic() > deadline:
                return len(cache.entries) == len(files)
        return True


def summary(run: Run) -> dict[str, Any]:
    """What the list of runs shows of one."""
    ends = start_and_end(run)
    rewards = [v for v in run.column("critic/score_all/mean") if v is not None]
    rewards = rewards or [v for v in run.column("critic/score/mean") if v is not None]
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


def _epoch(path: Path) -> int:
    """Names the file itself: rows are only ever appended to one, and a cut replaces it by another."""
    try:
        return path.stat().st_ino
    except OSError:
        return 0


def _stat(path: Path) -> tuple[int, int]:
    try:
        info = path.stat()
    except OSError:
        return (-1, 0)
    return info.st_size, info.st_mtime_ns
