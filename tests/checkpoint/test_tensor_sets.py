"""Tensor sets in one file or in shards: written by a group of one rank, and read whole, by name or in place."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from gspo.checkpoint import tensor_sets
from gspo.checkpoint.contents import Stored
from gspo.untrusted import Unreadable

SETS = {
    "optimizer": {"exp_avg/w": torch.arange(6.0).view(2, 3), "step/w": torch.tensor(4.0)},
    "critic/optimizer": {"exp_avg/v": torch.full((3,), 2.0, dtype=torch.bfloat16)},
    "empty": {},
}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Iterator[Path]:
    """A folder with the sets as one rank writes them."""
    folder = tmp_path_factory.mktemp("sharded")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        tensor_sets.write_sets(SETS, folder)
    finally:
        dist.destroy_process_group()
    yield folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    """A folder with the same sets, one file each, and a file of another kind."""
    folder = tmp_path_factory.mktemp("plain")
    for name, members in SETS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        save_file(members, folder / f"{name}.safetensors")
    return folder


def files_of(folder: Path) -> list[str]:
    return [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()] + ["state.json"]


@pytest.fixture(params=["sharded", "plain"])
def folder(request) -> Path:
    return request.getfixturevalue(request.param)


def test_sets_are_read_back_whole(folder):
    assert sorted(tensor_sets.set_names(folder, files_of(folder))) == sorted(SETS)
    sets = tensor_sets.read_sets(folder, files_of(folder))
    assert sets.keys() == SETS.keys()
    for name, members in SETS.items():
        assert sets[name].keys() == members.keys()
        for key, tensor in members.items():
            assert sets[name][key].dtype == tensor.dtype and torch.equal(sets[name][key], tensor)


def test_shapes_and_types_are_known_without_reading_the_values(folder):
    assert tensor_sets.stored_set("optimizer", folder) == {
        "exp_avg/w": Stored((2, 3), "F32"),
        "step/w": Stored((), "F32"),
    }
    assert tensor_sets.stored_set("critic/optimizer", folder) == {"exp_avg/v": Stored((3,), "BF16")}
    assert tensor_sets.stored_set("unknown", folder) == {}


def test_a_set_fills_existing_tensors_and_leaves_the_others_as_they_are(folder):
    names = ("exp_avg/w", "step/w", "other")
    shapes = ((2, 3), (), (2,))
    members = {name: torch.full(shape, -1.0) for name, shape in zip(names, shapes, strict=True)}
    before = dict(members)
    tensor_sets.fill_set(members, "optimizer", folder, left_out=["step/w"])
    assert members["exp_avg/w"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert float(members["step/w"]) == -1 and members["other"].tolist() == [-1.0, -1.0]
    assert all(members[name] is before[name] for name in names), "in place"
    tensor_sets.fill_set(members, "optimizer", folder)
    assert float(members["step/w"]) == 4
    critic = {"exp_avg/v": torch.zeros(3, dtype=torch.bfloat16)}
    tensor_sets.fill_set(critic, "critic/optimizer", folder)
    assert critic["exp_avg/v"].tolist() == [2.0, 2.0, 2.0]


def test_the_index_names_all_sets_and_the_number_of_ranks(sharded, plain):
    index = json.loads((sharded / "shards" / "index.json").read_text())
    assert index == {"world_size": 1, "sets": ["optimizer", "critic/optimizer", "empty"]}
    assert tensor_sets.sharded_sets(sharded) == index["sets"] and tensor_sets.sharded_sets(plain) == []


@pytest.mark.parametrize("sets", [None, "optimizer", ["a", 1], [""], ["../a"], ["/a"], ["a/../b"]])
def test_an_index_with_other_names_is_refused(tmp_path, sets):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "index.json").write_text(json.dumps({"sets": sets}))
    with pytest.raises(Unreadable, match="has no list of names `sets`"):
        tensor_sets.sharded_sets(tmp_path)


def test_the_log_of_the_library_is_as_before(sharded):
    log = logging.getLogger("torch.distributed.checkpoint")
    log.setLevel(logging.INFO)
    try:
        tensor_sets.read_sets(sharded, files_of(sharded))
        assert log.level == logging.INFO
    finally:
        log.setLevel(logging.NOTSET)
