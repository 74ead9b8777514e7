"""The tensor sets of a checkpoint: each in one file, or in shards that any number of ranks can read.

torch.distributed.checkpoint writes and reads shards in its safetensors layout: every rank's file says which part of each
tensor it holds, so tensors can be read whole or in other shards. No pickle is involved.
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
INDEX = "index.json"  # names all sets, including empty ones


def write_sets(sets: Mapping[str, TensorSet], folder: Path) -> None:
    """Write this rank's part of every set under `folder`/shards. Every rank calls it with the same folder."""
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
    """Every set under `folder`, without sharding. `files` are the checkpoint's files below it."""
    from safetensors.torch import load_file

    sets = {
        name.removesuffix(".safetensors"): load_file(folder / name)
        for name in files
        if name.endswith(".safetensors") and not name.startswith(f"{SHARDS}/")
    }
    index = folder / SHARDS / INDEX
    for name in json.loads(index.read_text())["sets"] if index.is_file() else ():
        place = folder / SHARDS / name
        sets[name] = {
            key: torch.empty(tuple(entry.size), dtype=entry.properties.dtype) for key, entry in _stored(place).items()
        }
        _fill(sets[name], place)
    return sets


def fill_set(members: TensorSet, name: str, folder: Path) -> None:
    """Read a set into existing tensors, sharded or not, in place. Tensors that are not stored keep their values.

    Each rank reads only what its shards need. Any number of ranks may have written the set.
    """
    sharded = (folder / SHARDS / INDEX).is_file()
    place = folder / SHARDS / name if sharded else (folder / name).parent
    stored = _stored(place)
    _fill({key: tensor for key, tensor in members.items() if key in stored}, place)


def _stored(place: Path) -> dict[str, Any]:
    """Metadata of the tensors in a folder, by name."""
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
    """A context without the library's warnings."""
    log = logging.getLogger("torch.distributed.checkpoint")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
