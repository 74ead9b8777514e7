"""Paths as users write them."""

from __future__ import annotations

import os
from pathlib import Path


def user_path(path: str | Path) -> Path:
    """The path with `~` or `~user` at its start as a home folder. That of an unknown user stays as it is written."""
    return Path(os.path.expanduser(path))
