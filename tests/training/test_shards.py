"""What a rank of a sharded model does by itself: which layers are shards, which sizes are refused, and what moves when."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from gspo.training.critic import ValueModel
from gspo.training.optim.host_device_pipeline import HostDevicePipeline
from gspo.training.parallel import ShardError
from gspo.training.parallel.fsdp import Shards, ShardSettings, _mesh, decoder_layers, full
from gspo.training.parallel.sequence import SequenceRanks
from tests.training.models import FAMILIES, llama


@pytest.mark.parametrize("family", FAMILIES)
def test_the_layers_of_a_decoder_are_its_outermost_blocks(family):
    model = FAMILIES[family]()
    base = model.base_model
    blocks = list(getattr(base, "layers", None) or base.h)
    assert len(blocks) == 2
    for root in (model, ValueModel(model)):
        assert [id(layer) for layer in decoder_layers(root)] == [id(block) for block in blocks]


def test_a_number_of_ranks_that_does_not_divide_the_trainer_is_refused(monkeypatch):
    made = []
    monkeypatch.setattr(
        "gspo.training.parallel.fsdp.init_device_mesh",
        lambda kind, shape, mesh_dim_names: made.append((kind, shape, mesh_dim_names)),
    )
    for fsdp_size in (0, -2, 4, 12):
        with pytest.raises(ShardError, match=f"fsdp_size={fsdp_size} does not divide the 6 trainer ranks"):
            _mesh(torch.device("cpu"), 6, fsdp_size)
    for fsdp_size in (-1, 6, 2, 1):
        _mesh(torch.device("cpu"), 6, fsdp_size)
    copies = [("cpu", shape, ("copy", "shard")) for shape in ((3, 2), (6, 1))]
    assert made == [("cpu", (6,), ("shard",))] * 2 + copies


def rank_alone(model: torch.nn.Module, device: str = "cpu", **settings: bool) -> Shards:
    """A rank whose model is not sharded."""
    shards = Shards.__new__(Shards)
    shards.rank, shards.size, shards.model = 0, 1, model
    shards.device, shards.settings = torch.device(device), ShardSettings(**settings)
    shards.whole = SimpleNamespace(reshard=lambda: None, to=lambda device: None)  # type: ignore[assignment]
    return shards


def test_offloaded_parts_are_on_the_device_within_the_context_alone():
    for device, weights, state, policy, given in itertools.product(("cpu", "meta"), *[(False, True)] * 4):
        moved: list[tuple[str, str]] = []
        settings = {"param_offload": weights, "optimizer_offload": state, "offload_policy": policy}
        shards = rank_alone(torch.nn.Linear(1, 1), device, **settings)
        shards.whole = SimpleNamespace(to=lambda to, moved=moved: moved.append(("weights", str(to))))  # type: ignore[assignment]
        optimizer = SimpleNamespace(move_state=lambda to, moved=moved: moved.append(("state", str(to))))
        with shards.resident(optimizer if given else None):  # type: ignore[arg-type]
            inside = list(moved)
        parts = [name for name, on in (("weights", weights), ("state", state and given)) if on]
        moves = parts if device != "cpu" and not policy else []
        assert inside == [(name, "meta") for name in moves]
        assert moved[len(inside) :] == [(name, "cpu") for name in moves]


def test_tied_parameters_have_each_of_their_names():
    model = llama()
    found = dict(rank_alone(model).full_tensors())
    assert found["lm_head.weight"] is found["model.embed_tokens.weight"]
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items())
    assert full(found["lm_head.weight"]) is found["lm_head.weight"]
    shapes = rank_alone(model).shapes()
    assert ("model.norm.weight", [32], "torch.float32") in shapes and len(shapes) == len(list(model.parameters()))


def test_a_sum_counts_one_rank_of_each_sequence_in_the_order_of_ranks(monkeypatch):
    def all_gather(parts, values):
        for rank, part in enumerate(parts):
            part.copy_(values * 10**rank)

    monkeypatch.setattr(dist, "all_gather", all_gather)
    shards = rank_alone(torch.nn.Linear(1, 1))
    shards.size = 4
    assert shards.sum(torch.tensor([1.0, 2.0])).tolist() == [1111.0, 2222.0]
    shards.sequence = SequenceRanks(0, 2, None)
    assert shards.sum(torch.tensor([1.0, 2.0])).tolist() == [101.0, 202.0]


def test_pieces_of_host_memory_are_changed_in_place_one_after_another():
    """Five pieces of two tensors each, of different sizes, through two slots."""
    pieces = [(torch.full((size,), float(size)), torch.full((size + 1,), -1.0)) for size in (3, 1, 4, 2, 4)]
    seen = []

    def compute(index: int, tensors: list[torch.Tensor]) -> None:
        seen.append((index, [len(tensor) for tensor in tensors]))
        tensors[0].mul_(10)
        tensors[1].add_(index)

    pipeline = HostDevicePipeline(torch.device("cpu"))
    pipeline.run(pieces, compute)
    pipeline.wait()
    assert seen == [(i, [size, size + 1]) for i, size in enumerate((3, 1, 4, 2, 4))]
    for index, (first, second) in enumerate(pieces):
        assert first.tolist() == [10.0 * len(first)] * len(first)
        assert second.tolist() == [index - 1.0] * len(second)
    pipeline.run([], compute)
    assert len(seen) == 5
