"""The rows of a run: those of its files, of the user's dataset class, or those that the caller passes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

from omegaconf import OmegaConf

from gspo.config import TrainerConfig
from gspo.data.columns import Columns, Say, as_rows
from gspo.data.datasets import Split, has_held_out, load_rows
from gspo.data.held_out import split_rows
from gspo.data.rows import DataError, Row
from gspo.rewards.functions import load_module


def rows_of_split(
    config: TrainerConfig,
    tokenizer: Any,
    split: str,
    columns: Columns,
    given: Iterable[Any] | None = None,
    say: Say | None = None,
) -> list[Row]:
    """The rows of a split ("train" or "val"): those the config names, or the rows that are given.

    `say` gets a sentence for each dataset whose columns were guessed.
    """
    if given is None and config.data.custom_cls.path is not None:
        given = custom_dataset(config, tokenizer, split)
    if given is None:
        limit = config.data.num_train_samples if split == "train" else config.data.num_val_samples
        return _rows_of_files(config, cast(Split, split), columns, limit, say)
    return as_rows(given, f"{split}_dataset", columns, say)


def training_rows(config: TrainerConfig, limit: int | None, *, needs_truth: bool = True) -> list[Row]:
    """The first `limit` training rows of the config's files; None: all."""
    c = config.data
    columns = Columns(c.prompt_key, c.ground_truth_key if needs_truth else None, c.data_source_key, c.response_key)
    limits = [number for number in (limit, c.num_train_samples) if number is not None]
    return _rows_of_files(config, "train", columns, min(limits, default=None))


def sft_rows(config: TrainerConfig, columns: Columns) -> list[Row]:
    """All rows of `data.sft_files`."""
    assert config.data.sft_files is not None
    return _load_all(config, config.data.sft_files, "train", columns, None, None, key="sft_files")


def custom_dataset(config: TrainerConfig, tokenizer: Any, split: str) -> list[Any]:
    """The items of the user's dataset class for a split; none for held-out data without files."""
    c = config.data
    files = c.train_files if split == "train" else c.val_files
    if files is None:
        return []
    key, name = "data.custom_cls", c.custom_cls.name or ""
    assert c.custom_cls.path is not None
    cls = getattr(load_module(c.custom_cls.path, f"{key}.path"), name, None)
    if not callable(cls):
        raise DataError(f"{key}.name", f"is {name!r}; {c.custom_cls.path} has no such class")
    limit = c.num_train_samples if split == "train" else c.num_val_samples
    options = OmegaConf.create(dataclasses.asdict(c))
    dataset = cls(
        data_files=files if isinstance(files, list) else [files], tokenizer=tokenizer, config=options, processor=None
    )
    items = [dataset[i] for i in range(min(len(dataset), limit or len(dataset)))]  # pyright: ignore
    return [_with_prompt(item, c.prompt_key) for item in items]


def _with_prompt(item: Any, key: str) -> Any:
    """An item of verl's dataset keeps its messages in `raw_prompt`."""
    if not isinstance(item, Mapping) or key in item or "raw_prompt" not in item:
        return item
    return {**{k: v for k, v in item.items() if k != "raw_prompt"}, key: list(item["raw_prompt"])}


def held_out_share(config: TrainerConfig) -> float | None:
    """The share of the training rows that is held out; None: the held-out data is named, or a part of the dataset."""
    share = config.data.val_split
    return share if isinstance(share, float) and config.data.val_files is None else None


def given_datasets(
    config: TrainerConfig, columns: Columns, train: Iterable[Any] | None, val: Iterable[Any] | None, say: Say | None
) -> tuple[Iterable[Any] | None, Iterable[Any] | None]:
    """Training and held-out rows that are passed in Python. Training rows alone: a share of them, or none, is held out."""
    if train is None or val is not None or config.data.val_files is not None:
        return train, val
    share = held_out_share(config)
    if share is None:
        return train, []  # held-out questions of the default task say nothing about the caller's data
    return split_rows(as_rows(train, "train_dataset", columns, say), share)


def _rows_of_files(
    config: TrainerConfig, split: Split, columns: Columns, limit: int | None, say: Say | None = None
) -> list[Row]:
    c, share = config.data, held_out_share(config)
    if split == "val" and c.val_files is not None:
        return _load_all(config, c.val_files, "val", columns, limit, say, key="val_files")[:limit]
    names = [c.train_files] if isinstance(c.train_files, str) else c.train_files
    own = [name for name in names if has_held_out(name, c.val_split if isinstance(c.val_split, str) else None)]
    if share is None:
        chosen = names if split == "train" else own
        return _load_all(config, chosen, split, columns, limit, say)[:limit]
    shared = _load_all(config, [name for name in names if name not in own], "train", columns, None, say)
    train, held_out = split_rows(shared, share) if shared else ([], [])
    others = _load_all(config, own, split, columns, limit, say)
    return [*others, *(train if split == "train" else held_out)][:limit]


def _load_all(
    config: TrainerConfig,
    names: str | list[str],
    split: Split,
    columns: Columns,
    limit: int | None,
    say: Say | None,
    key: Literal["train_files", "val_files", "sft_files"] = "train_files",
) -> list[Row]:
    """The rows of the named datasets, one after another."""
    c, rows = config.data, []
    named_split = c.val_split if split == "val" and isinstance(c.val_split, str) else None
    for name in [names] if isinstance(names, str) else names:
        try:
            rows += load_rows(
                name,
                split,
                limit=limit,
                # Held-out questions are the same for every seed, so that runs can be compared.
                seed=config.trainer.seed if split == "train" else 0,
                columns=columns,
                hub_split=c.train_split if split == "train" else named_split,
                system_prompt=c.system_prompt,
                say=say,
            )
        except DataError as error:
            if error.where != name:  # a row of a file
                raise
            raise DataError(f"data.{key}={name}", str(error).removeprefix(f"{name}: ")) from error
    return rows
