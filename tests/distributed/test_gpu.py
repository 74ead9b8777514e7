"""FSDP2 on one GPU (nccl): the numbers of the plain model there, with shards on the device or in host memory."""

from __future__ import annotations

import pytest
import torch

from gspo.distributed.torchrun_ranks import TorchrunRanks
from tests.distributed.cases import build_policy, updates
from tests.training.models import llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

SHARDINGS = {
    "on the device": {},
    "without resharding": {"reshard_after_forward": False},
    "moved between uses": {"param_offload": True, "optimizer_offload": True},
    "offloaded by FSDP2": {"offload_policy": True},
}


@pytest.fixture(scope="module")
def ranks():
    joined = TorchrunRanks.join("cuda:0")
    yield joined
    joined.dismiss()


@pytest.mark.parametrize("name", SHARDINGS)
def test_shards_on_a_gpu_train_as_the_plain_model_does(ranks, name):
    plain = updates(build_policy(llama().cuda(), False))
    policy = build_policy(llama(), True, sharding={"device": "cuda:0", **SHARDINGS[name]})
    with policy.ranks.resident(policy.optimizer):
        pass  # from here on what is offloaded lies in host memory
    with policy.ranks.resident(policy.optimizer):
        found = updates(policy)
    for key, value in plain.items():
        if isinstance(value, torch.Tensor):
            size = max(1.0, float(value.abs().max()))
            assert float((found[key].cpu() - value.cpu()).abs().max()) <= 1e-4 * size, key


def test_offloaded_state_lies_in_host_memory(ranks):
    sharding = {"device": "cuda:0", **SHARDINGS["moved between uses"]}
    policy = build_policy(llama(), True, sharding=sharding)
    with policy.ranks.resident(policy.optimizer):
        updates(policy, num=1)
        assert all(p.to_local().is_cuda for p in policy.optimizer.parameters.values())
    assert not any(p.to_local().is_cuda for p in policy.optimizer.parameters.values())
    moments = [s["exp_avg"].to_local() for s in policy.optimizer.adamw.state.values()]
    assert moments and not any(m.is_cuda for m in moments)
