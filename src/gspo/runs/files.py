"""Writing files so that a crash leaves the old one or the new one, never half of either."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def errors_name(path: Path) -> Iterator[None]:
    """A context whose OSErrors name `path`: one of a write, such as that of a full disk, names no file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_atomic(path: Path, data: bytes) -> None:
    """Replace `path` with `data`: temporary file, fsync, rename, fsync of the folder. Nothing is left after an error."""
    temporary = path.with_name(f".{path.name}.tmp")
    with errors_name(path):
        try:
            with open(temporary, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.replace(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any) -> None:
    write_atomic(path, (json.dumps(value, indent=1, ensure_ascii=False) + "\n").encode())


def sync_file(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder durable."""
    sync_file(path)
