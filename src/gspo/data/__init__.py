"""Datasets: rows from files, the hub and built-in tasks; prompts in a resumable order. Names load on first use."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.data.datasets import dataset, load_rows
    from gspo.data.rows import Row

__all__ = ["Row", "dataset", "load_rows"]

_HOMES = {"Row": "gspo.data.rows", "dataset": "gspo.data.datasets", "load_rows": "gspo.data.datasets"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
