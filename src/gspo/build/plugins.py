"""The user's own modules: imported at start, so that losses, advantages, rewards and datasets can register."""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from gspo.data.rows import DataError
from gspo.registry import import_file


def import_plugins(names: Sequence[str]) -> None:
    """Import each file or module of `trainer.plugins`, once."""
    for name in names:
        try:
            import_file(name) if name.endswith(".py") else importlib.import_module(name)
        except Exception as error:
            raise DataError(
                "trainer.plugins",
                f"names {name!r}, which cannot be imported: {type(error).__name__}: {error}",
            ) from error
