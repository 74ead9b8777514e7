"""Which GPUs rollout workers use, and that workers on a GPU that also trains sleep during training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gspo.build import engines
from gspo.config import load
from gspo.distributed.gpu_place import GpuPlace, gpu_place
from gspo.distributed.launch import trainer_gpus
from gspo.models.load import load_tokenizer
from gspo.rollout.engine import EngineError

ROLLOUT = "actor_rollout_ref.rollout."


@pytest.mark.parametrize(
    ("num_gpus", "training", "width", "firsts", "shared"),
    [
        (1, {0}, 1, [0, 0], True),
        (3, {0}, 1, [1, 2, 1], False),
        (4, {0}, 2, [1, 1], False),
        (5, {0}, 2, [1, 3, 1], False),
        (2, {0}, 2, [0], True),
        (4, {2}, 1, [0, 1, 3, 0], False),
        (4, {1}, 2, [2, 2], False),
        (8, {0, 1, 2, 3}, 1, [4, 5, 6, 7, 4], False),
        (4, {0, 1, 2, 3}, 1, [0, 1, 2, 3, 0], True),
        (4, {0, 1, 2}, 2, [0, 2, 0], True),
    ],
)
def test_workers_use_gpus_without_trainer_ranks_first(num_gpus, training, width, firsts, shared):
    places = [gpu_place(i, num_gpus, training, width) for i in range(len(firsts))]
    assert places == [GpuPlace(first, shared) for first in firsts]


def test_more_gpus_than_the_machine_has_are_refused():
    with pytest.raises(EngineError, match=r"tensor_model_parallel_size=4: this machine has 2 GPUs.*backend=ray"):
        gpu_place(0, 2, {0}, 4)


@pytest.fixture
def two_ranks(monkeypatch):
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)


def specs(monkeypatch, num_gpus: int, count: int, *overrides: str) -> list[Any]:
    """The specs of the first workers of this machine, as if it had that many GPUs."""
    made = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(engines, "ProcessConnection", lambda spec, index, log: made.append(spec))
    config = load(overrides=list(overrides)).config
    device = torch.device("cuda")
    spec = engines.engine_spec(config, load_tokenizer("embedded"), device, count)
    connect, _ = engines._local(spec, trainer_gpus(device), None)
    for index in range(count):
        connect(index)
    return made


@pytest.mark.parametrize(("engine", "key"), [("vllm", "sleep"), ("native", "free_cache")])
def test_workers_sleep_only_where_they_share_a_gpu_with_a_trainer_rank(monkeypatch, two_ranks, engine, key):
    name = f"{ROLLOUT}name={engine}"
    shared = specs(monkeypatch, 2, 2, name)
    assert [(s.device, s.options[key]) for s in shared] == [("cuda:0", True), ("cuda:1", True)]
    apart = specs(monkeypatch, 4, 2, name)
    assert [(s.device, s.options[key]) for s in apart] == [("cuda:2", False), ("cuda:3", False)]
    kept = specs(monkeypatch, 2, 1, name, f"{ROLLOUT}free_cache_engine=false")
    assert [s.options[key] for s in kept] == [False]
    others = {k: v for k, v in shared[0].options.items() if k != key}
    assert others == {k: v for k, v in apart[0].options.items() if k != key}, "nothing else depends on it"


def test_an_engine_that_runs_ahead_of_the_trainer_does_not_sleep(monkeypatch):
    ahead = (f"{ROLLOUT}name=vllm", f"{ROLLOUT}mode=async", f"{ROLLOUT}max_head_offpolicyness=2")
    assert [s.options["sleep"] for s in specs(monkeypatch, 1, 1, *ahead)] == [False]
    assert [s.options["sleep"] for s in specs(monkeypatch, 1, 1, ahead[0])] == [True]


def test_the_gpu_of_the_config_is_the_trainer_s():
    assert trainer_gpus(torch.device("cuda:3")) == {3} and trainer_gpus(torch.device("cuda")) == {0}
