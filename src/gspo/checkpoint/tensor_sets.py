"""The sets of tensors of a checkpoint: each in one file, or in shards that many ranks wrote and any number can read.

Shards are written and read by torch.distributed.checkpoint in its safetensors layout: every rank's file says which part
of each tensor it holds, so a tensor is put together for whoever asks, whole or in other shards. No pickle is involved.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TensorSet = dict[str, Tensor]
SHARDS = "shards"
INDEX = "index.json"  # names the sets, also those that are empty


def write_sets(sets: Mapping[str, TensorSet], folder: Path) -> None:
    """Write this rank's part of every set under `folder`/shards. Every rank calls it; the folder is common to all."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

    with _quiet():
        for name, members in sets.items():
            place = folder / SHARDS / name
            place.mkdir(parents=True, exist_ok=True)
            if members:
                dcp.save(members, storage_writer=HuggingFaceStorageWriter(str(place), save_distributed=True))
    if dist.get_rank() == 0:
        index = {"world_size": dist.get_world_size(), "sets": list(sets)}
        (folder / SHARDS / INDEX).write_text(json.dumps(index))


def read_sets(folder: Path, files: Iterable[str]) -> dict[str, TensorSet]:
    """Every set under `folder`, in one piece. `files` are the names below it that belong to the checkpoint."""
    from safetensors.torch import load_file

    sets = {
        name.removesuffix(".safetensors"): load_file(folder / name)
        for name in files
        if name.endswith(".safetensors") and not name.startswith(f"{SHARDS}/")
    }
    if (folder / SHARDS / INDEX).is_file():
        for name in _sets_in(folder):
            sets[name] = _read_whole(folder / SHARDS / name)
    return sets


def fill_set(members: TensorSet, name: str, folder: Path) -> set[str]:
    """Read a set into tensors that are there, sharded or not, in place; the names that were found.

    Each rank reads only what its shards need, whatever number of ranks wrote the set.
    """
    sharded = (folder / SHARDS / INDEX).is_file()
    place = folder / SHARDS / name if sharded else (folder / name).parent
    stored = _stored(place)
    found = {key: tensor for key, tensor in members.items() if key in stored}
    _fill(found, place)
    return set(found)


def _sets_in(folder: Path) -> list[str]:
    return json.loads((folder / SHARDS / INDEX).read_text())["sets"]


def _read_whole(place: Path) -> TensorSet:
    members = {
        key: torch.empty(tuple(entry.size), dtype=entry.properties.dtype) for key, entry in _stored(place).items()
    }
    _fill(members, place)
    return members


def _stored(place: Path) -> dict[str, Any]:
    """What a folder's files say they hold, by name."""
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    return HuggingFaceStorageReader(str(place)).read_metadata().state_dict_metadata


def _fill(members: TensorSet, place: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

    if members:
        with _quiet():
            dcp.load(members, storage_reader=HuggingFaceStorageReader(str(place)), no_dist=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's remarks about what it does not do."""
    log = logging.getLogger("torch.distributed.checkpoint")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
