"""Folders that `save_to_disk` of the datasets package wrote: Arrow files, with or without named splits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo import untrusted
from gspo.data.rows import DataError
from gspo.paths import user_path

_STATE, _SPLITS = "state.json", "dataset_dict.json"


def is_saved(path: str | Path) -> bool:
    """Whether a path is such a folder."""
    folder = user_path(path)
    return (folder / _STATE).is_file() or (folder / _SPLITS).is_file()


def saved_splits(path: str | Path) -> list[str]:
    """The names of the folder's splits; none for a single table."""
    folder = user_path(path)
    if not (folder / _SPLITS).is_file():
        return []
    return [str(name) for name in _read(folder / _SPLITS, "splits")]


def read_saved(path: str, split: str) -> Iterator[tuple[str, Any]]:
    """`(folder:number, record)` of a saved table, or of one split of several; counted from 1."""
    folder = user_path(path)
    splits = saved_splits(path)
    if splits and split not in splits:
        raise DataError(path, f"has no split {split!r}; it has {', '.join(splits)} (data.train_split, data.val_split)")
    name = f"{path}[{split}]" if splits else path
    return _records(folder / split if splits else folder, name)


def _records(folder: Path, name: str) -> Iterator[tuple[str, Any]]:
    try:
        import pyarrow as pa
        from pyarrow.lib import ArrowException
    except ImportError:
        raise DataError(name, "is a saved dataset, which needs pyarrow; install gspo[data]") from None
    number = 0
    try:
        for entry in _read(folder / _STATE, "_data_files"):
            file = folder / Path(str(entry["filename"])).name  # only files of this folder
            with pa.memory_map(str(file)) as source, pa.ipc.open_stream(source) as batches:
                for batch in batches:
                    for record in batch.to_pylist():
                        number += 1
                        yield f"{name}:{number}", record
    except (ArrowException, OSError, KeyError, TypeError) as error:
        raise DataError(name, f"is not readable as a saved dataset ({str(error).splitlines()[0]})") from None
    if not number:
        raise DataError(name, "has no rows; expected at least one")


def _read(file: Path, key: str) -> list[Any]:
    try:
        found = untrusted.read_json(file)
    except (OSError, untrusted.Unreadable) as error:
        raise DataError(str(file), f"cannot be read ({error})") from None
    value = found.get(key) if isinstance(found, dict) else None
    if not isinstance(value, list):
        raise DataError(str(file), "is missing; expected a file of a saved dataset", field=key)
    return value
