"""Datasets by name: the registry, and `load_rows`, which reads a built-in, a file or a hub dataset."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any, Literal

from gspo.data.arithmetic import load_arithmetic
from gspo.data.rows import DataError, Row

Split = Literal["train", "val"]
Loader = Callable[..., list[Row]]

_LOADERS: dict[str, Loader] = {}


def dataset(name: str) -> Callable[[Loader], Loader]:
    """Register `loader(split, *, limit, seed, **options) -> list[Row]` under `name`."""

    def register(loader: Loader) -> Loader:
        if name in _LOADERS:
            raise ValueError(f"dataset {name!r} is registered twice")
        _LOADERS[name] = loader
        return loader

    return register


dataset("arithmetic")(load_arithmetic)


def dataset_names() -> list[str]:
    """The registered names, sorted."""
    return sorted(_LOADERS)


def load_rows(
    name_or_path: str,
    split: Split = "train",
    *,
    limit: int | None = None,
    seed: int = 0,
    columns: Any = None,
) -> list[Row]:
    """The rows of a dataset: at most `limit`, in a fixed order for the same `seed`."""
    if name_or_path not in _LOADERS:
        near = difflib.get_close_matches(name_or_path, _LOADERS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise DataError(
            name_or_path, f"is no dataset or file; expected one of {', '.join(dataset_names())}{hint}"
        )
    return _LOADERS[name_or_path](split, limit=limit, seed=seed)
