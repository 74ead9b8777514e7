"""A rollout worker behind a Ray actor, beside the contract: deaths, and tensors that travel through Ray."""

from __future__ import annotations

import os
import signal

import pytest
import torch

from gspo.distributed.ray.connection import RayConnection
from gspo.distributed.ray.tensors import send_as_arrays
from gspo.distributed.ray.weight_store import ObjectStore, ObjectWeights
from gspo.rollout.workers.connection import WorkerDied
from gspo.rollout.workers.worker import EngineSpec, RolloutWorker
from tests.distributed.ray.waiting import wait_until

SPEC = EngineSpec("none", "none", "none", 1, 8, (0,), 0)


class Reader(RolloutWorker):
    """Has no engine; returns the weights that it received."""

    def __init__(self, spec: EngineSpec) -> None: ...

    def load_weights(self, ref, version):
        return version, {name: (t.dtype, t.tolist()) for name, t in ref.items()}

    def close(self) -> None: ...


@pytest.fixture
def connection(cluster):
    connection = RayConnection(SPEC, {"num_cpus": 1}, Reader, "rollout worker 3")
    yield connection
    connection.close()


def test_a_worker_class_gets_published_weights_as_tensors_until_it_is_killed(connection):
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.full((4,), 2.5, dtype=torch.bfloat16)}
    store = ObjectStore()
    version, seen = connection.send(RolloutWorker.load_weights, store.publish(tensors, 4), 4).result(60)
    assert version == 4 and seen == {name: (t.dtype, t.tolist()) for name, t in tensors.items()}
    store.close()
    os.kill(connection.send(RolloutWorker.ping).result(30), signal.SIGKILL)
    assert wait_until(lambda: not connection.alive), "the death of an idle worker is noticed without a call"
    with pytest.raises(WorkerDied, match=r"^rollout worker 3 died"):
        connection.send(RolloutWorker.ping).result(1)


def test_object_weights_are_a_mapping_to_the_bit():
    tensors = {"w": torch.randn(3, 5), "h": torch.randn(2, 2).to(torch.bfloat16)}
    packed = ObjectWeights(tensors)
    assert list(packed) == ["w", "h"] and len(packed) == 2
    assert all(torch.equal(packed[name], tensors[name]) for name in tensors)


def test_tensors_pass_through_ray_unchanged_into_writable_memory(cluster):
    import ray

    send_as_arrays()
    sent = {
        "float": torch.randn(3, 4)[:, ::2],
        "half": torch.randn(5).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "one": torch.tensor(3.5, dtype=torch.float64),
        "none": torch.zeros(0, 2),
    }
    back = ray.get(ray.put(sent))
    for name, tensor in sent.items():
        assert back[name].dtype == tensor.dtype and torch.equal(back[name], tensor), name
    back["float"].zero_()  # may be written
