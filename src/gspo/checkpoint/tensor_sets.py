"""The tensor sets of a checkpoint: each in one file, or in shards that any number of ranks can read.

torch.distributed.checkpoint writes and reads shards in its safetensors layout: every rank's file says which part of
each tensor it holds, so tensors can be read whole or in other shards. No pickle is involved.
"""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gspo import untrusted
from gspo.checkpoint.contents import Stored, read_header

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

    sets = {name: load_file(folder / f"{name}.safetensors") for name in _whole_sets(files)}
    for name in sharded_sets(folder):
        place = folder / SHARDS / name
        stored = _stored(place)
        num_bytes = sum(math.prod(e.size) * e.properties.dtype.itemsize for e in stored.values())
        if num_bytes > sum(file.stat().st_size for file in place.glob("*.safetensors")):
            raise untrusted.Unreadable(place, f"announces {num_bytes:,} bytes of tensors, more than its files have")
        sets[name] = {key: torch.empty(tuple(e.size), dtype=e.properties.dtype) for key, e in stored.items()}
        _fill(sets[name], place)
    return sets


def set_names(folder: Path, files: Iterable[str]) -> list[str]:
    """The names of all sets under `folder`."""
    return [*_whole_sets(files), *sharded_sets(folder)]


def _whole_sets(files: Iterable[str]) -> list[str]:
    """The names of the sets that lie in one file each."""
    names = [name for name in files if name.endswith(".safetensors") and not name.startswith(f"{SHARDS}/")]
    return [name.removesuffix(".safetensors") for name in names]


def sharded_sets(folder: Path) -> list[str]:
    """The names of the sets that ranks wrote in parts; [] when there are none."""
    index = folder / SHARDS / INDEX
    if not index.is_file():
        return []
    content = untrusted.read_json(index)
    names = content.get("sets") if isinstance(content, dict) else None
    if not isinstance(names, list) or not all(
        isinstance(n, str) and n and ".." not in n and n[0] != "/" for n in names
    ):
        raise untrusted.Unreadable(index, "has no list of names `sets`")
    return names


def stored_set(name: str, folder: Path) -> dict[str, Stored]:
    """Shape and type of the tensors of a set, sharded or not; {} when it is not stored."""
    if sharded_sets(folder):
        place = folder / SHARDS / name
        entries = _stored(place) if place.is_dir() else {}
        names = {torch.float32: "F32", torch.float64: "F64", torch.bfloat16: "BF16", torch.float16: "F16"}
        return {
            key: Stored(tuple(e.size), names.get(e.properties.dtype, str(e.properties.dtype)))
            for key, e in entries.items()
        }
    file = folder / f"{name}.safetensors"
    return read_header(file) if file.is_file() else {}


def fill_set(members: TensorSet, name: str, folder: Path, left_out: Collection[str] = ()) -> None:
    """Read a set into existing tensors, sharded or not, in place. Those not stored or `left_out` keep their values.

    Each rank reads only what its shards need. Any number of ranks may have written the set.
    """
    sharded = (folder / SHARDS / INDEX).is_file()
    place = folder / SHARDS / name if sharded else (folder / name).parent
    stored = _stored(place)
    _fill({key: tensor for key, tensor in members.items() if key in stored and key not in left_out}, place)


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
