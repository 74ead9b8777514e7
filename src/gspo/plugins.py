"""Modules that extend gspo: files and modules of `trainer.plugins`, and installed packages that declare an entry point.

A package declares itself in its pyproject.toml, and is imported at the start of every run:

    [project.entry-points."gspo.plugins"]
    mine = "my_package.my_module"
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

ENTRY_POINTS = "gspo.plugins"


class PluginError(ValueError):
    """A plugin cannot be imported. The message names where it was asked for, and the cause."""


def import_plugins(names: Sequence[str]) -> None:
    """Import installed plugins and each file or module of `trainer.plugins`, once per process."""
    import_installed()
    for name in names:
        path = Path(name).expanduser()
        try:
            if path.suffix == ".py":
                _import_file(path)
            else:
                importlib.import_module(name)
        except Exception as error:
            raise PluginError(
                f"trainer.plugins names {name!r}, which cannot be imported: {type(error).__name__}: {error}"
            ) from error


@cache
def import_installed() -> None:
    """Import the modules that installed packages declare as plugins."""
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except Exception as error:
            owner = f" of {point.dist.name}" if point.dist is not None else ""
            raise PluginError(
                f"the plugin {point.name!r}{owner} ({point.value}) cannot be imported: "
                f"{type(error).__name__}: {error}; uninstall the package, or repair it"
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
