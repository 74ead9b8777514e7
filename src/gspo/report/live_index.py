"""The groups that the dashboard lists: index entries of one run, read again only when their files change."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.runs import reading
from gspo.runs.group_index import GroupIndex, spread

FIRST_SECONDS = 0.25  # how long the first request may read files before it answers with what it has
BATCH_SECONDS = 1.0  # the same of later ones, which a page draws less eagerly
MAX_LISTED = 2000  # steps of training, and of evaluations, whose groups are listed
MAX_RANGE = 200  # steps that one request for a range of steps lists

Key = tuple[int, str]  # step and kind, which is train or eval
Stamp = tuple[int, int]


def stamp(path: Path) -> Stamp:
    """Size and time of a file: the same stamp means the same content."""
    try:
        info = path.stat()
    except OSError:
        return (-1, 0)
    return info.st_size, info.st_mtime_ns


class StepFiles:
    """The step files of one run, found again when their folders change, and the index beside them."""

    def __init__(self, path: Path) -> None:
        self._folders = {"train": path / "groups", "eval": path / "evals"}
        self._indexes = {kind: GroupIndex(f, held_out=kind == "eval") for kind, f in self._folders.items()}
        self._stamps: dict[str, Stamp] = {}
        self._files: dict[str, dict[int, Path]] = {}

    def refresh(self) -> bool:
        """Find new files. Returns whether a folder has changed."""
        changed = False
        for kind, folder in self._folders.items():
            now = stamp(folder)
            if now != self._stamps.get(kind):
                self._files[kind], self._stamps[kind] = reading.step_files(folder), now
                changed = True
            self._indexes[kind].refresh()
        return changed

    def all(self) -> dict[Key, Path]:
        return {(step, kind): file for kind, files in self._files.items() for step, file in files.items()}

    def listed(self) -> list[Key]:
        """The steps whose groups a page lists from the start, ascending: all of them, or evenly spaced ones."""
        return sorted((step, kind) for kind, files in self._files.items() for step in spread(files, MAX_LISTED))

    def within(self, first: int, last: int) -> list[Key]:
        """Steps of a range, at most MAX_RANGE of each kind."""
        return sorted(
            (step, kind)
            for kind, files in self._files.items()
            for step in spread((s for s in files if first <= s <= last), MAX_RANGE)
        )

    def entry(self, key: Key) -> str:
        """The index entry of a step as JSON text, which is smaller in memory than its values."""
        step, kind = key
        entry, _ = self._indexes[kind].entry(step, self._files[kind][step])
        return reading.to_json({"step": step, "kind": kind, **entry})


@dataclass
class IndexCache:
    """The index entries of one run in the order of reading, each with the stamp of its file.

    `generation` changes when a file that was read has changed or is gone, or when other steps are listed.
    """

    files: StepFiles
    entries: dict[Key, tuple[Stamp, str]] = field(default_factory=dict)
    generation: int = 1
    complete: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def forget_changed(self, files: dict[Key, Path], listed: list[Key]) -> None:
        """Drop the entries of steps that were written again (after a resume) or removed; pages then start over."""
        current = {k: e for k, e in self.entries.items() if k in files and stamp(files[k]) == e[0]}
        if len(current) > 2 * len(listed):
            current = {k: e for k, e in current.items() if k in set(listed)}
        if len(current) < len(self.entries):
            self.entries, self.generation = current, self.generation + 1

    def read_new(self, files: dict[Key, Path], listed: list[Key], seconds: float) -> bool:
        """Read listed steps that have no entry yet, for a short while; returns whether all have one now."""
        deadline = time.monotonic() + seconds
        missing = [key for key in listed if key not in self.entries]
        for number, key in enumerate(missing, 1):
            seen = stamp(files[key])
            self.entries[key] = seen, self.files.entry(key)
            if time.monotonic() > deadline:
                return number == len(missing)
        return True

    def answer(self, after: int, generation: int) -> dict[str, Any]:
        """Entries after the first `after`, which the page has; `complete` is False when files remain."""
        with self.lock:
            changed = self.files.refresh()
            files, listed = self.files.all(), self.files.listed()
            if changed or self.complete:  # looking at every file for every part would take longer than reading them
                self.forget_changed(files, listed)
            self.complete = self.read_new(files, listed, BATCH_SECONDS if after else FIRST_SECONDS)
            start = after if generation == self.generation else 0
            texts = [text for _, text in list(self.entries.values())[start:]]
            return {
                "entries": [json.loads(text) for text in texts],
                "complete": self.complete,
                "generation": self.generation,
                "num_steps": len(files),
                "num_listed": len(self.entries),
            }

    def range(self, first: int, last: int) -> dict[str, Any]:
        """Entries of a range of steps, read for a short while."""
        deadline = time.monotonic() + BATCH_SECONDS
        with self.lock:
            self.files.refresh()
            out = []
            for key in self.files.within(first, last):
                held = self.entries.get(key)
                out.append(json.loads(held[1] if held else self.files.entry(key)))
                if time.monotonic() > deadline:
                    break
            return {"entries": out}
