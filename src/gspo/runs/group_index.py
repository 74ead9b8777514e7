"""The group index: a few facts about every group, so that a page can list, filter and chart groups without their texts.

`groups/index.jsonl` and `evals/index.jsonl` have one line per step, written with the step's file: step, size, time and
CRC of that file, then `groups` and `ratios`. The index is a cache. A line that is missing, damaged, or older than its
file is made again from the file. Of several lines of a step the last one counts.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo import untrusted
from gspo.runs import reading
from gspo.runs.stats import share_right
from gspo.untrusted import Unreadable

INDEX = "index.jsonl"
MAX_INDEX = 4096 * untrusted.MiB
MAX_LINES = 4_000_000
Entry = dict[str, Any]
_HEAD = re.compile(rb'\{"step":(\d{1,12}),"size":(\d{1,15}),"mtime_ns":(\d{1,20}),"crc":(\d{1,10}),')

HELD_OUT = "held_out"
FIELDS = ("uid", "fate", "source", "n", "rate", "score", "tokens", "question", "truth", "version")
_NUMBER = (int, float, type(None))
_TYPES = (str, str, str, int, _NUMBER, _NUMBER, int, str, str, object)
QUESTION_CHARS = 160
TRUTH_CHARS = 48
NAME_CHARS = 300


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the line of a step is in the index, and the file that it was made from."""

    offset: int
    length: int
    size: int
    mtime_ns: int
    crc: int


class GroupIndex:
    """The index of one folder of step files. Lines are found once and read on demand."""

    def __init__(self, folder: Path, *, held_out: bool = False) -> None:
        self.folder, self._held_out = folder, held_out
        self._path = folder / INDEX
        self._places: dict[int, _Place] = {}
        self._file, self._offset = (0, 0), 0

    def refresh(self) -> None:
        """Find the lines that were added since the last call."""
        try:
            with untrusted.open_plain(self._path) as file:
                info = os.fstat(file.fileno())
                if (info.st_dev, info.st_ino) != self._file or not self._offset <= info.st_size <= MAX_INDEX:
                    self._file, self._offset, self._places = (info.st_dev, info.st_ino), 0, {}
                if info.st_size > MAX_INDEX:
                    return
                file.seek(self._offset)
                for line in untrusted.lines(file, self._path):
                    if not line.endswith(b"\n") or len(self._places) > MAX_LINES:
                        break
                    if match := _HEAD.match(line):
                        step, size, mtime_ns, crc = map(int, match.groups())
                        self._places[step] = _Place(self._offset, len(line), size, mtime_ns, crc)
                    self._offset += len(line)
        except (Unreadable, OSError):
            return

    def entry(self, step: int, file: Path) -> tuple[Entry, bool]:
        """What a page lists of a step, and whether it came from the index, not from the step's file.

        `groups` has a list in the order of FIELDS for each group, `ratios` ratio - 1 of every trained response, and
        `problem` says why groups of a damaged file are missing.
        """
        found = self._stored(step, file)
        return (found, True) if found is not None else (index_file(file, self._held_out), False)

    def _stored(self, step: int, file: Path) -> Entry | None:
        place = self._places.get(step)
        if place is None or not _is_fresh(place, file):
            return None
        try:
            with untrusted.open_plain(self._path) as index:
                index.seek(place.offset)
                line = index.read(place.length)
            value = untrusted.parse_json(line.decode("utf-8"), self._path)
        except (Unreadable, OSError, UnicodeDecodeError):
            return None
        groups, ratios = value.get("groups"), value.get("ratios")
        if not isinstance(groups, list) or not isinstance(ratios, list) or not all(map(_is_line, groups)):
            return None
        if not set(map(type, ratios)) <= {int, float}:
            return None
        return {"groups": groups, "ratios": ratios}

    def add(self, step: int, file: Path, entry: Entry) -> None:
        """Append the entry of a step whose file is on disk. A failure is no error: the line is made again later."""
        with contextlib.suppress(OSError, Unreadable):
            info = file.stat()
            head = {"step": step, "size": info.st_size, "mtime_ns": info.st_mtime_ns, "crc": _crc(file)}
            line = reading.to_json({**head, "groups": entry["groups"], "ratios": entry["ratios"]}) + "\n"
            with open(self._path, "a+b", buffering=0) as index:
                if index.tell() and os.pread(index.fileno(), 1, index.tell() - 1) != b"\n":
                    line = "\n" + line  # a write was cut off here
                index.write(line.encode("utf-8", "replace"))


def _is_fresh(place: _Place, file: Path) -> bool:
    """Whether a line was made from the file as it is now. A copied file has another time but the same CRC."""
    try:
        info = file.stat()
        if info.st_size != place.size:
            return False
        return info.st_mtime_ns == place.mtime_ns or _crc(file) == place.crc
    except (OSError, Unreadable):
        return False


def _crc(file: Path) -> int:
    """The CRC-32 of a gzip file's content, from its last bytes."""
    with untrusted.open_plain(file) as f:
        f.seek(-8, os.SEEK_END)
        return int.from_bytes(f.read(4), "little")


def _is_line(line: Any) -> bool:
    """Whether a value has the types of an index line."""
    return isinstance(line, list) and len(line) == len(FIELDS) and all(map(isinstance, line, _TYPES))


def spread(steps: Iterable[int], limit: int) -> list[int]:
    """All steps, or of more than `limit` those at every k-th place, with k a power of 2, and the last one."""
    ordered = sorted(steps)
    stride = 1
    while len(ordered) > limit * stride:
        stride *= 2
    return sorted({*ordered[::stride], *ordered[-1:]})


def index_file(file: Path, held_out: bool = False) -> Entry:
    """The entry of a step, made from its file; `problem` says what of it could not be read."""
    problems: list[str] = []
    entry = index_step(reading.read_groups(file, numbers=False, problems=problems), held_out)
    return {**entry, "problem": "; ".join(problems)} if problems else entry


def index_step(records: Sequence[Mapping[str, Any]], held_out: bool = False) -> Entry:
    """`groups`: a list in the order of FIELDS for each record; `ratios`: ratio - 1 of every trained response."""
    ratios: list[float] = []
    return {"groups": [_line(r, held_out, ratios) for r in records], "ratios": ratios}


def _line(record: Mapping[str, Any], held_out: bool, ratios: list[float]) -> list[Any]:
    responses = [r for r in record["responses"] if isinstance(r, dict)]
    share = share_right(responses)
    scores = [float(r["score"]) for r in responses if isinstance(r.get("score"), int | float)]
    trained = [float(r["ratio"]) - 1.0 for r in responses if isinstance(r.get("ratio"), int | float)]
    ratios += [round(v, 8) for v in trained]
    truth = record.get("ground_truth")
    facts = {
        "uid": str(record.get("uid", ""))[:NAME_CHARS],
        "fate": HELD_OUT if held_out else str(record.get("fate", ""))[:NAME_CHARS],
        "source": str(record.get("data_source", ""))[:NAME_CHARS],
        "n": len(scores) or len(responses),
        "rate": None if share is None else round(share, 4),
        "score": round(sum(scores) / len(scores), 4) if scores else None,
        "tokens": sum(int(n) for r in responses if isinstance(n := r.get("num_tokens"), int | float)),
        "question": question_of(record.get("messages"))[:QUESTION_CHARS],
        "truth": "" if truth is None else str(truth)[:TRUTH_CHARS],
        "version": version if isinstance(version := record.get("version"), int) else None,
    }
    return [facts[name] for name in FIELDS]


def question_of(messages: Any) -> str:
    """The last message a user wrote, on one line."""
    if not isinstance(messages, list):
        return ""
    written = [m for m in messages if isinstance(m, dict)]
    users = [m for m in written if m.get("role") == "user"] or written
    content = users[-1].get("content", "") if users else ""
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return " ".join(str(content).split())
