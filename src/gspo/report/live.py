"""What the dashboard knows: runs and group indexes, read again only when their files change."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gspo.report import words
from gspo.report.comparison import compare_runs
from gspo.report.live_index import IndexCache, Stamp, StepFiles, stamp
from gspo.report.overview import overview
from gspo.report.thinning import PER_BUCKET
from gspo.report.verdict import reward_ends, start_and_end
from gspo.runs.run import READ_NAMES, Run, find_runs, read_run, status_of

WATCHED = tuple(name for name in READ_NAMES if name != "groups")
SPARK_POINTS = 60
MAX_PROBLEM = 300  # characters of a problem in the list of runs
MAX_CELLS = 20_000_000  # metric values of all runs that stay in memory: 160 MB
MAX_INDEXES = 4  # runs whose groups stay listed in memory


@dataclass
class HeldRun:
    """What is known of one run. `run` is None when its metrics were dropped to save memory."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    stamps: tuple[Stamp, ...] = ()
    run: Run | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    steps: list[int] = field(default_factory=list)  # the last one
    result: dict[str, Any] | None = None

    def read(self, path: Path) -> Run:
        """The run as it is now: files are read again when they changed, the status is always fresh."""
        run, now = self.run, _stamps(path)  # `self.run` may be dropped at any time
        if run is None or self.stamps != now:
            run = read_run(path, None if run is None else run.metrics)
            self.stamps, self.steps, self.result = now, run.steps[-1:], run.result
            self.summary = summary(run)
        status = status_of(path, self.steps, self.result)
        self.run = run = run if run.status == status else replace(run, status=status)
        return run

    def summarise(self, path: Path) -> dict[str, Any]:
        """The summary as it is now, without the metrics when the files are as they were."""
        if not self.summary or self.stamps != _stamps(path):
            self.read(path)
        return {**self.summary, "status": status_of(path, self.steps, self.result)}


class LiveRuns:
    """The runs under one folder. Safe to call from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._runs: dict[str, HeldRun] = {}  # the one used last is the last
        self._indexes: dict[str, IndexCache] = {}
        self._lock = threading.Lock()

    def paths(self) -> Iterator[Path]:
        return find_runs(self.folder)

    def path(self, name: str) -> Path | None:
        """The folder of a run by name; None for a name that is not a run directly in the folder."""
        return next((p for p in self.paths() if p.name == name), None)

    def _held(self, path: Path, *, used: bool = True) -> HeldRun:
        """What is held of a run; drops the metrics of runs that were not used for long when there are too many."""
        with self._lock:
            held = self._runs.pop(path.name, None) if used else self._runs.get(path.name)
            held = self._runs.setdefault(path.name, held or HeldRun())
            cells = 0
            for other in list(self._runs.values())[::-1]:
                cells += 0 if other.run is None else other.run.metrics.num_cells
                if other is not held and cells > MAX_CELLS:
                    other.run = None
            return held

    def run(self, path: Path) -> Run:
        """The run as it is now."""
        held = self._held(path)
        with held.lock:
            return held.read(path)

    def overview(self, path: Path, after: int = 0, epoch: int = 0) -> dict[str, Any]:
        """The overview with the metric points after the first `after`, which the page has; all after a replacement.

        The last bucket of points that a page has is sent again: an evaluation adds to the row of its step, and rows are
        added to a bucket.
        """
        held = self._held(path)
        with held.lock:
            out = overview(held.read(path))
        out["epoch"] = _epoch(path / "metrics.jsonl", out["thinned"])
        known = after if epoch == out["epoch"] and after <= len(out["columns"]["step"]) else 0
        again = 1 if out["thinned"] == 1 else PER_BUCKET
        out["offset"] = max(0, known - again)
        out["columns"] = {name: values[out["offset"] :] for name, values in out["columns"].items()}
        return out

    def compare(self, paths: Sequence[Path]) -> dict[str, Any]:
        """Runs compared, with their overviews."""
        held = {path: self._held(path) for path in paths}
        with contextlib.ExitStack() as locked:
            for path in sorted(held):  # in one order for all requests, so that none waits for another
                locked.enter_context(held[path].lock)
            runs = [held[path].read(path) for path in paths]
            return {"comparison": compare_runs(runs), "overviews": [overview(run) for run in runs]}

    def tag(self, path: Path) -> str:
        """Changes whenever the run's overview may have changed."""
        held = self._held(path)
        with held.lock:
            status = held.summarise(path)["status"]
        return f"{hash((_stamps(path), status)) & 0xFFFFFFFFFFFF:x}"

    def summaries(self) -> list[dict[str, Any]]:
        """One entry per run, for the list of runs. A run that cannot be read is listed with the reason."""
        return [self._summary(path) for path in self.paths()]

    def _summary(self, path: Path) -> dict[str, Any]:
        held = self._held(path, used=False)
        with held.lock:
            try:
                return held.summarise(path)
            except Exception as error:  # whatever a folder holds, the other runs are shown
                reason = f"cannot be read ({type(error).__name__}: {error})"
                return summary(Run(path, problems=(reason,)))

    def _index(self, path: Path) -> IndexCache:
        with self._lock:
            cache = self._indexes.pop(path.name, None) or IndexCache(StepFiles(path))
            self._indexes[path.name] = cache
            while len(self._indexes) > MAX_INDEXES:
                del self._indexes[next(iter(self._indexes))]
            return cache

    def index(self, path: Path, after: int, generation: int) -> dict[str, Any]:
        """Index entries after the first `after`, which the page has; reads new files for a short while, then answers.

        `complete` is False when files remain: the page asks again. Of a long run evenly spaced steps are listed.
        """
        return self._index(path).answer(after, generation)

    def index_range(self, path: Path, first: int, last: int) -> dict[str, Any]:
        """Index entries of a range of steps, whether they are listed or not."""
        return self._index(path).range(first, last)


def summary(run: Run) -> dict[str, Any]:
    """What the list of runs shows about a run."""
    ends = start_and_end(run)
    rewards = run.values("critic/score_all/mean") or run.values("critic/score/mean")
    stride = max(1, len(rewards) // SPARK_POINTS)
    return {
        "name": run.name,
        "status": run.status,
        "last_step": run.last_step,
        "total_steps": total if isinstance(total := run.setting("trainer.total_training_steps"), int) else None,
        "accuracy": run.accuracy[-1][1] if run.accuracy else None,
        "start_accuracy": ends[0] if ends else None,
        "held_out_reward": None if run.accuracy else reward_ends(run),
        "curve": rewards[::-stride][::-1],
        "seconds": run.seconds,
        "alarms": len(run.alarms),
        "tags": tags if isinstance(tags := run.setting("trainer.tags"), list) else [],
        "model": words.name_of(run.setting("actor_rollout_ref.model.path")),
        "problems": [problem[:MAX_PROBLEM] for problem in run.problems],
    }


def _stamps(path: Path) -> tuple[Stamp, ...]:
    return tuple(stamp(path / name) for name in WATCHED)


def _epoch(path: Path, bucket: int) -> int:
    """The identity of the points: rows are appended to a file, and cutting rows off replaces it by another file."""
    try:
        return hash((path.stat().st_ino, bucket)) & 0xFFFFFFFFFFFF
    except OSError:
        return 0
