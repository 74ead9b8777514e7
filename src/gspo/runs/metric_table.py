"""The metrics of a run in columns: every value exactly as in metrics.jsonl, at 8 bytes per value."""

from __future__ import annotations

import json
import math
import os
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from gspo import untrusted
from gspo.untrusted import Unreadable

MAX_LINE = 4 * untrusted.MiB
MAX_LINES = 2_000_000
MAX_NAMES = 2_000
MAX_NAME = 300  # characters
MAX_CELLS = 40_000_000  # 320 MB
MAX_STEP = 1 << 53  # beyond it a browser cannot tell steps apart
_NONE = math.nan  # metrics.jsonl has no NaN: it is stored as null


class MetricTable:
    """Rows by ascending step. Rows of one step are merged, the later value wins.

    `read` adds what was appended to the file since the last call; a file that was replaced is read from its start.
    """

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self.steps: list[int] = []
        self._columns: dict[str, array[float]] = {}
        self._place: dict[int, int] = {}  # step → row
        self._file, self._offset, self._num_lines = (0, 0), 0, 0
        self._last = b""  # the line before the offset
        self._form: list[bytes] = []  # the keys of the last row as its line has them, the step first
        self._sizes: list[int] = []
        self._row_columns: list[array[float]] = []  # of the metrics of the last row
        self.problem: str | None = None

    def __len__(self) -> int:
        return len(self.steps)

    @property
    def num_cells(self) -> int:
        return len(self.steps) * len(self._columns)

    def read(self, path: Path) -> MetricTable:
        """Read the new rows of a file. What lies over a limit is left out, and `problem` says so."""
        try:
            with untrusted.open_plain(path) as file:
                info = os.fstat(file.fileno())
                if (info.st_dev, info.st_ino) != self._file or not self._goes_on(file):
                    self._forget()
                    self._file = (info.st_dev, info.st_ino)
                file.seek(self._offset)
                for line in untrusted.lines(file, path, MAX_LINE):
                    if not self._add_alike(line):
                        row = _parse(line, path)
                        if row is None and not line.endswith(b"\n"):
                            break  # half written
                        self._add(row or {}, path)
                        self._note_form(line, row or {})
                    self._offset += len(line)
                    self._last = line
        except FileNotFoundError:
            self._forget()
        except Unreadable as error:
            self.problem = error.reason
        except OSError as error:
            self.problem = f"cannot be read ({error.strerror})"
        self._sort()
        return self

    def _goes_on(self, file: BinaryIO) -> bool:
        """Whether the file still has the line that was read last: one that was replaced may have the old number."""
        file.seek(self._offset - len(self._last))
        return file.read(len(self._last)) == self._last

    def _add_alike(self, line: bytes) -> bool:
        """Add a row that has the metrics of the last one in the same order, as nearly all have; False when it has not.

        Such a line is split at the known places, which is several times faster than to parse it.
        """
        parts = line[1:-2].split(b", ")
        if len(parts) != len(self._form) or line[:1] + line[-2:] != b"{}\n":
            return False
        if not all(map(bytes.startswith, parts, self._form)):
            return False
        digits = parts[0][self._sizes[0] :]
        try:
            values = [float(part[size:]) for part, size in zip(parts[1:], self._sizes[1:])]
            step = int(digits) if digits.isdigit() else -1
        except ValueError:  # null, another type, or too many digits
            return False
        is_new = self.steps and self.steps[-1] < step < MAX_STEP and step not in self._place
        if not is_new or not math.isfinite(sum(values)) or self.num_cells > MAX_CELLS or len(self) >= MAX_LINES:
            return False
        self._num_lines += 1
        self._place[step] = len(self.steps)
        for column, value in zip(self._row_columns, values):
            if len(column) < len(self.steps):
                column.extend([_NONE] * (len(self.steps) - len(column)))
            column.append(value)
        self.steps.append(step)
        return True

    def _note_form(self, line: bytes, row: dict[str, Any]) -> None:
        """Remember what the lines of further rows look like, if this one is as the trainer writes them."""
        names = list(row)
        self._form = [json.dumps(name).encode() + b": " for name in names]
        self._sizes = [len(key) for key in self._form]
        self._row_columns = [c for name in names[1:] if (c := self._columns.get(name)) is not None]
        if names[:1] != ["step"] or len(self._row_columns) != len(names) - 1:
            self._form = []

    def _add(self, row: dict[str, Any], path: Path) -> None:
        self._num_lines += 1
        if self._num_lines > MAX_LINES or self.num_cells > MAX_CELLS:
            limit = f"{MAX_LINES:,} rows" if self._num_lines > MAX_LINES else f"{MAX_CELLS:,} values"
            raise Unreadable(path, f"has more than {limit}; those after step {max(self.steps, default=0)} are left out")
        step = row.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < MAX_STEP:
            return
        place = self._place.setdefault(step, len(self.steps))
        if place == len(self.steps):
            self.steps.append(step)
        for name, value in row.items():
            if name == "step" or len(name) > MAX_NAME:
                continue
            column = self._columns.get(name)
            if column is None:
                if len(self._columns) >= MAX_NAMES:
                    self.problem = f"has more than {MAX_NAMES:,} metrics; the others are left out"
                    continue
                column = self._columns[name] = array("d")
            number = value if _is_finite(value) else _NONE
            if place < len(column):
                column[place] = number
                continue
            if place > len(column):
                column.extend([_NONE] * (place - len(column)))
            column.append(number)

    def _sort(self) -> None:
        """Pad the columns to the same length, and put the rows in the order of their steps."""
        size = len(self.steps)
        for column in self._columns.values():
            column.extend([_NONE] * (size - len(column)))
        if all(a < b for a, b in zip(self.steps, self.steps[1:])):
            return
        order = sorted(range(size), key=self.steps.__getitem__)
        self.steps = [self.steps[i] for i in order]
        self._place = {step: place for place, step in enumerate(self.steps)}
        for name, column in self._columns.items():
            self._columns[name] = array("d", (column[i] for i in order))
        self._form = []  # its columns were replaced

    def names(self) -> list[str]:
        """Every metric that occurs in some row, in order of appearance."""
        return list(self._columns)

    def numbers(self, name: str) -> array[float]:
        """A metric, one number per row, NaN where the row has none. Not to be changed."""
        column = self._columns.get(name)
        return array("d", [_NONE]) * len(self.steps) if column is None else column

    def column(self, name: str) -> list[float | None]:
        """A metric, one value per row, None where the row has none."""
        return [None if math.isnan(v) else v for v in self.numbers(name)]

    def row(self, place: int) -> dict[str, Any]:
        """The values of one row, with its step."""
        values = {name: column[place] for name, column in self._columns.items()}
        return {"step": self.steps[place], **{name: v for name, v in values.items() if not math.isnan(v)}}

    def rows(self) -> Iterator[dict[str, Any]]:
        """Every row, with the values that it has."""
        return (self.row(place) for place in range(len(self.steps)))


def _parse(line: bytes, path: Path) -> dict[str, Any] | None:
    """The object of a line; None when it does not parse or is something else."""
    try:
        value = untrusted.parse_json(line.decode("utf-8", "replace"), path)
    except Unreadable:
        return None
    return value if isinstance(value, dict) else None


def _is_finite(value: Any) -> bool:
    """Whether a value is a number that a float can have."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
