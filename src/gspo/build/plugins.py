"""The user's own modules: imported at start, so that losses, advantages, rewards and datasets can register."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from gspo.data.rows import DataError


def import_plugins(names: Sequence[str]) -> None:
    """Import each file or module of `trainer.plugins`, once."""
    for name in names:
        path = Path(name).expanduser()
        try:
            if path.suffix == ".py":
                _import_file(path)
            else:
                importlib.import_module(name)
        except Exception as error:
            raise DataError(
                "trainer.plugins",
                f"names {name!r}, which cannot be imported: {type(error).__name__}: {error}",
            ) from error


def _import_file(path: Path) -> None:
    name = f"gspo_plugin_{path.resolve().stem}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
