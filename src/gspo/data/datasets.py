"""Datasets by name: the registry, and `load_rows`, which reads a built-in task, a file or a hub dataset."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from gspo.data.columns import Columns, to_row
from gspo.data.files import SUFFIXES, read_records
from gspo.data.hub_records import hub_records
from gspo.data.rows import DataError, Row
from gspo.data.tasks.arithmetic import load_arithmetic
from gspo.data.tasks.calculator import load_calculator
from gspo.data.tasks.code import load_code
from gspo.data.tasks.gsm8k import HUB_NAME, is_gsm8k, load_gsm8k, to_gsm8k_row
from gspo.data.tasks.guess import load_guess
from gspo.data.tasks.math import load_math
from gspo.data.tasks.mixed import load_mixed
from gspo.data.tasks.reasoning import load_reasoning
from gspo.data.tasks.reasoning_gym import load_reasoning_gym
from gspo.registry import Registry

Split = Literal["train", "val"]
Loader = Callable[..., list[Row]]

DATASETS: Registry[Loader] = Registry("dataset")


def dataset(name: str) -> Callable[[Loader], Loader]:
    """Register `loader(split, *, limit, seed) -> list[Row]` under `name`."""
    return DATASETS.register(name)


dataset("arithmetic")(load_arithmetic)
dataset("calculator")(load_calculator)
dataset("guess")(load_guess)
dataset("math")(load_math)
dataset("reasoning")(load_reasoning)
dataset("code")(load_code)
dataset("mixed")(load_mixed)
dataset("gsm8k")(load_gsm8k)
dataset(HUB_NAME)(load_gsm8k)


def dataset_names() -> list[str]:
    """The registered names, sorted."""
    return sorted(DATASETS.names())


def load_rows(
    name_or_path: str,
    split: Split = "train",
    *,
    limit: int | None = None,
    seed: int = 0,
    columns: Columns | None = None,
    hub_split: str | None = None,
    system_prompt: str | None = None,
) -> list[Row]:
    """The rows of a dataset: the first `limit`, in a fixed order for the same `seed`.

    `name_or_path` is a registered name, `reasoning_gym:TASK[,key=value…]`, a jsonl or parquet file (in verl's row
    format, in GSM8K's, or with named columns), `gsm8k:PATH`, or a hub dataset `owner/name[:config]`, whose split is
    `hub_split` (by default train, or test for "val"). Files have no split: both splits get all their rows.
    """
    if limit is not None and limit < 1:
        raise DataError(name_or_path, f"cannot be cut to {limit} rows; expected at least 1")
    rows = _load(name_or_path, split, limit, seed, columns, hub_split)
    if system_prompt is None:
        return rows
    return [_with_system_prompt(row, system_prompt) for row in rows]


def _load(
    name: str, split: str, limit: int | None, seed: int, columns: Columns | None, hub_split: str | None
) -> list[Row]:
    if name in DATASETS:
        return DATASETS.get(name)(split, limit=limit, seed=seed)
    prefix, _, rest = name.partition(":")
    if prefix == "reasoning_gym":
        task, _, options = rest.partition(",")
        return load_reasoning_gym(split, limit=limit, seed=seed, task=task, options=options)
    if prefix == "gsm8k":
        return load_gsm8k(split, limit=limit, seed=seed, path=rest)
    if prefix in ("jsonl", "parquet"):
        return _records_to_rows(read_records(rest), limit, columns)
    if Path(name).suffix in SUFFIXES or Path(name).expanduser().is_file():
        return _records_to_rows(read_records(name), limit, columns)
    if Path(name).expanduser().is_dir():
        raise DataError(name, "is a folder; expected a jsonl or parquet file (gsm8k:FOLDER for GSM8K's)")
    if prefix.count("/") == 1 and not name.startswith(("/", ".", "~")):
        default = "train" if split == "train" else "test"
        return _records_to_rows(hub_records(prefix, hub_split or default, config=rest or None), limit, columns)
    raise DataError(name, _unknown(name))


def _records_to_rows(records: Iterable[tuple[str, Any]], limit: int | None, columns: Columns | None) -> list[Row]:
    """The first `limit` records as rows; GSM8K's own format is recognised unless columns are named."""
    named = columns is not None and columns != Columns()
    return [
        to_gsm8k_row(record, where) if not named and is_gsm8k(record) else to_row(record, where, columns)
        for where, record in itertools.islice(records, limit)
    ]


def _with_system_prompt(row: Row, text: str) -> Row:
    if row.messages[0].get("role") == "system":
        return row
    return dataclasses.replace(row, messages=({"role": "system", "content": text}, *row.messages))


def _unknown(name: str) -> str:
    hint = f"; did you mean {near!r}?" if (near := DATASETS.nearest(name)) else ""
    return (
        f"is not a dataset; expected one of {', '.join(dataset_names())}, reasoning_gym:TASK, a jsonl or parquet file, "
        f"or a hub name owner/name{hint}"
    )
