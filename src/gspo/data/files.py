"""Records of jsonl, json, csv, tsv and parquet files, each with the `file:line` by which messages name it."""

from __future__ import annotations

import codecs
import csv
import glob
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo.data.rows import DataError
from gspo.paths import user_path

SUFFIXES = (".jsonl", ".json", ".ndjson", ".csv", ".tsv", ".parquet")
KINDS = "a jsonl, json, csv, tsv or parquet file"
MAX_CELL = 32 << 20  # characters of one cell of a csv file


def read_records(path: str | Path) -> Iterator[tuple[str, Any]]:
    """`(file:line, record)` of a file, by its suffix; rows of parquet and items of a JSON array count from 1."""
    file = user_path(path)
    if not file.is_file():
        raise DataError(str(path), f"is not a file; expected {KINDS}")
    if file.suffix == ".parquet":
        return _read_parquet(file, str(path))
    if file.suffix in (".csv", ".tsv"):
        return _read_csv(file, str(path))
    if file.suffix == ".json" and _is_array(file):
        return _read_array(file, str(path))
    if file.suffix in SUFFIXES:
        return _read_jsonl(file, str(path))
    raise DataError(str(path), f"ends in {file.suffix!r}; expected one of {', '.join(SUFFIXES)}")


def is_pattern(name: str) -> bool:
    """Whether a name is a pattern of files, such as `data/*.jsonl`, and not a file with such a name."""
    return glob.has_magic(name) and not user_path(name).exists()


def matching_files(pattern: str) -> list[str]:
    """The files of a pattern in the order of their names; `**` matches folders of any depth."""
    found = glob.glob(str(user_path(pattern)), recursive=True)
    files = sorted(name for name in found if Path(name).is_file())
    if not files:
        raise DataError(pattern, "matches no file")
    return files


def _is_array(file: Path) -> bool:
    with file.open("rb") as data:
        return data.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")


def _read_array(file: Path, name: str) -> Iterator[tuple[str, Any]]:
    records = _parse(file.read_bytes().removeprefix(codecs.BOM_UTF8), name, "an array of objects")
    if not records:
        raise DataError(f"{name}:1", "has no rows; expected at least one")
    return ((f"{name}:{number}", record) for number, record in enumerate(records, start=1))


def _read_csv(file: Path, name: str) -> Iterator[tuple[str, Any]]:
    """Records by the header's names; an empty cell is null. A record is named by its first line."""
    csv.field_size_limit(MAX_CELL)
    line = num_records = 0
    try:
        with file.open(encoding="utf-8-sig", newline="") as text:
            reader = csv.reader(text, delimiter=_delimiter(file), strict=True)
            header: list[str] | None = None
            for cells in reader:
                where, line = f"{name}:{line + 1}", reader.line_num
                if header is None:
                    header = _header(cells, where)
                elif cells:
                    yield where, _by_name(header, cells, where)
                    num_records += 1
    except csv.Error as error:
        raise DataError(f"{name}:{line + 1}", f"is not readable as csv ({error})") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise DataError(
            f"{name}:{line + 1}", f"or a line below is not UTF-8 (byte {byte:#x}); save it as UTF-8"
        ) from None
    if not num_records:
        raise DataError(f"{name}:1", "has no rows; expected a line of column names and one line per row")


def _delimiter(file: Path) -> str:
    """What separates the cells: a tab in a tsv file, else a comma, or a semicolon or tab where the header has no comma."""
    if file.suffix == ".tsv":
        return "\t"
    with file.open(encoding="utf-8-sig", errors="replace") as text:
        header = text.readline(1 << 16)
    return next((mark for mark in ",;\t" if mark in header), ",")


def _header(cells: list[str], where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    if len(set(names)) < len(names) or not all(names):
        raise DataError(where, f"has the column names {', '.join(names)}; expected different names")
    return names


def _by_name(header: list[str], cells: list[str], where: str) -> dict[str, str | None]:
    if len(cells) > len(header):
        raise DataError(where, f"has {len(cells)} cells; the first line names {len(header)} columns")
    return {column: cell or None for column, cell in zip(header, cells)}


def _read_jsonl(file: Path, name: str) -> Iterator[tuple[str, Any]]:
    num_records = 0
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if not line.strip():
                continue
            where = f"{name}:{number}"
            yield where, _parse(line, where)
            num_records += 1
    if not num_records:
        raise DataError(f"{name}:1", "has no rows; expected one JSON object per line")


def _parse(line: bytes, where: str, expected: str = "one object per line") -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(where, f"is not UTF-8 (byte {error.start + 1}: {error.reason})") from None
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise DataError(where, f"is not JSON (column {error.colno}: {error.msg}); expected {expected}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(where, f"is JSON that cannot be used ({error})") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _read_parquet(file: Path, name: str) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow.parquet as parquet
        from pyarrow.lib import ArrowException
    except ImportError:
        raise DataError(name, "is a parquet file, which needs pyarrow; install gspo[data]") from None
    number = 0
    try:
        with parquet.ParquetFile(file) as table:
            for batch in table.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{name}:{number}", record
    except (ArrowException, OSError) as error:
        raise DataError(f"{name}:{number + 1}", f"is not readable as parquet ({str(error).splitlines()[0]})") from None
    if not number:
        raise DataError(f"{name}:1", "has no rows; expected at least one")
