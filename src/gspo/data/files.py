"""Records of jsonl and parquet files, each with the `file:line` by which messages name it."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo.data.rows import DataError

SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet")


def read_records(path: str | Path) -> Iterator[tuple[str, Any]]:
    """`(file:line, record)` of a file, by its suffix; parquet rows count from 1 like lines."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise DataError(str(path), "is not a file; expected a jsonl or parquet file")
    if file.suffix == ".parquet":
        return _read_parquet(file, str(path))
    if file.suffix in SUFFIXES:
        return _read_jsonl(file, str(path))
    raise DataError(str(path), f"ends in {file.suffix!r}; expected one of {', '.join(SUFFIXES)}")


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


def _parse(line: bytes, where: str) -> Any:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(where, f"is not UTF-8 (byte {error.start + 1}: {error.reason})") from None
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise DataError(
            where, f"is not JSON (column {error.colno}: {error.msg}); expected one object per line"
        ) from None
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
