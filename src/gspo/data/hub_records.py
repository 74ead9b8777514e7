"""Records of hub datasets, read by the `datasets` package (extra `data`). No code of a dataset is ever run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo import hub
from gspo.data.rows import HubDataError


def hub_records(name: str, split: str, *, config: str | None = None) -> Iterator[tuple[str, Any]]:
    """`(name[split]:number, record)` of a hub dataset, counted from 1."""
    try:
        import datasets
    except ImportError:
        raise HubDataError(
            name, "is a dataset of the hub, which needs the datasets package; install gspo[data], or use a local file"
        ) from None
    reason = hub.why_unreachable(name, "dataset")
    if reason and not hub.is_cached(name, "dataset") and not _is_prepared(name):
        raise HubDataError(
            name,
            f"is not a local file, and the hub cannot be reached ({reason}); use a local jsonl or parquet file, or check "
            "the name in data.train_files or data.val_files and the connection",
        )
    try:
        table = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # dozens of types: offline, no such name, no such split, gated
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise HubDataError(
            f"{name}[{split}]", f"could not be read from the hub ({first}); use a local jsonl or parquet file"
        ) from error
    return ((f"{name}[{split}]:{i}", record) for i, record in enumerate(table, start=1))


def _is_prepared(name: str) -> bool:
    """Whether the cache of the `datasets` package has tables of the name, which it reads without the hub."""
    from datasets import config

    return (Path(config.HF_DATASETS_CACHE) / name.replace("/", "___")).is_dir()
