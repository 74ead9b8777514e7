"""Modules that extend gspo: files and modules of `trainer.plugins`, and installed packages that declare an entry point.

A package declares itself in its pyproject.toml, and is imported at the start of every run:

    [project.entry-points."gspo.plugins"]
    mine = "my_package.my_module"
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from importlib.metadata import entry_points

from gspo.registry import PluginError, import_file

ENTRY_POINTS = "gspo.plugins"


def import_plugins(names: Sequence[str]) -> None:
    """Import installed plugins and each file or module of `trainer.plugins`, once per process."""
    import_installed()
    for name in names:
        try:
            import_file(name) if name.endswith(".py") else importlib.import_module(name)
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"trainer.plugins names {name!r}, which cannot be imported: {type(error).__name__}: {error}"
            ) from error


@cache
def import_installed() -> None:
    """Import the modules that installed packages declare as plugins."""
    for point in entry_points(group=ENTRY_POINTS):
        try:
            point.load()
        except (Exception, SystemExit) as error:
            owner = f" of {point.dist.name}" if point.dist is not None else ""
            raise PluginError(
                f"the plugin {point.name!r}{owner} ({point.value}) cannot be imported: "
                f"{type(error).__name__}: {error}; uninstall the package, or repair it"
            ) from error
