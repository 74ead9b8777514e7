"""Datasets by name: the registry, and `load_rows`, which reads a built-in task, files, a folder or a hub dataset."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

from gspo.data.columns import Columns, Say, records_to_rows
from gspo.data.files import KINDS, SUFFIXES, is_pattern, matching_files, read_records
from gspo.data.hub_records import hub_records
from gspo.data.rows import DataError, Row
from gspo.data.saved import is_saved, read_saved, saved_splits
from gspo.data.tasks.arithmetic import load_arithmetic
from gspo.data.tasks.calculator import load_calculator
from gspo.data.tasks.code import load_code
from gspo.data.tasks.countdown import load_countdown
from gspo.data.tasks.gsm8k import HUB_NAME, load_gsm8k
from gspo.data.tasks.guess import load_guess
from gspo.data.tasks.math import load_math
from gspo.data.tasks.mixed import load_mixed
from gspo.data.tasks.reasoning import load_reasoning
from gspo.data.tasks.reasoning_gym import load_reasoning_gym
from gspo.paths import user_path
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
dataset("countdown")(load_countdown)
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
    say: Say | None = None,
) -> list[Row]:
    """The rows of a dataset: the first `limit`, in a fixed order for the same `seed`.

    `name_or_path` is a registered name, `reasoning_gym:TASK[,key=value…]`, a file or a pattern of files (in verl's row
    format, in GSM8K's, or with usual or named columns), `gsm8k:PATH`, a folder of `save_to_disk`, or a hub dataset
    `owner/name[:config]`. The split of the last two is `hub_split` (by default train, or test for "val"). Files have
    no split: both splits get all their rows. `say` gets a sentence about columns that were guessed.
    """
    if limit is not None and limit < 1:
        raise DataError(name_or_path, f"cannot be cut to {limit} rows; expected at least 1")
    named_split = hub_split or ("train" if split == "train" else "test")
    if _is_task(name_or_path):
        rows = _load_task(name_or_path, split, limit, seed)
    else:
        say = None if say is None else functools.cache(say)  # once for all files of a pattern
        tables = _tables(name_or_path, named_split)
        every = itertools.chain.from_iterable(records_to_rows(t, name_or_path, columns, say) for t in tables)
        rows = list(itertools.islice(every, limit))
    if system_prompt is None:
        return rows
    return [_with_system_prompt(row, system_prompt) for row in rows]


def has_held_out(name: str, split: str | None) -> bool:
    """Whether a dataset has a held-out part: `split` of a hub or saved dataset (None: none), the val split of a task."""
    path = name.partition(":")[2] or name  # gsm8k:PATH, jsonl:PATH
    if _is_files(path):
        return False
    if is_saved(name):
        return split in saved_splits(name)
    return _is_task(name) or split is not None


def _tables(name: str, split: str) -> Iterable[Iterator[tuple[str, Any]]]:
    """The records of files, each by itself, of a saved folder or of a hub dataset."""
    prefix, _, rest = name.partition(":")
    path = rest if prefix in ("jsonl", "parquet") else name
    if is_pattern(path):
        return map(read_records, matching_files(path))
    if _is_files(path) or prefix in ("jsonl", "parquet"):
        return [read_records(path)]
    if is_saved(path):
        return [read_saved(path, split)]
    if user_path(name).is_dir():
        raise DataError(
            name,
            "is a folder; expected a file, a pattern such as FOLDER/*.jsonl, or a folder of save_to_disk "
            "(gsm8k:FOLDER for GSM8K's)",
        )
    if prefix.count("/") == 1 and not name.startswith(("/", ".", "~")):
        return [hub_records(prefix, split, config=rest or None)]
    raise DataError(name, _unknown(name))


def _is_task(name: str) -> bool:
    return name in DATASETS or name.partition(":")[0] in ("reasoning_gym", "gsm8k")


def _is_files(path: str) -> bool:
    return is_pattern(path) or Path(path).suffix in SUFFIXES or user_path(path).is_file()


def _load_task(name: str, split: str, limit: int | None, seed: int) -> list[Row]:
    if name in DATASETS:
        return DATASETS.get(name)(split, limit=limit, seed=seed)
    prefix, _, rest = name.partition(":")
    if prefix == "gsm8k":
        return load_gsm8k(split, limit=limit, seed=seed, path=rest)
    task, _, options = rest.partition(",")
    return load_reasoning_gym(split, limit=limit, seed=seed, task=task, options=options)


def _with_system_prompt(row: Row, text: str) -> Row:
    if row.messages[0].get("role") == "system":
        return row
    return dataclasses.replace(row, messages=({"role": "system", "content": text}, *row.messages))


def _unknown(name: str) -> str:
    hint = f"; did you mean {near!r}?" if (near := DATASETS.nearest(name)) else ""
    return (
        f"is not a dataset; expected one of {', '.join(dataset_names())}, reasoning_gym:TASK, {KINDS}, a pattern "
        f"of files, a folder of save_to_disk, or a hub name owner/name{hint}"
    )
