"""A rollout worker behind an actor: answers in order, weights by reference, errors and deaths as the protocol says."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

from gspo.distributed.ray.connection import RayConnection
from gspo.distributed.ray.tensors import send_as_arrays
from gspo.distributed.ray.weight_store import ObjectStore, ObjectWeights
from gspo.processes import WorkerError
from gspo.rollout.engine import EngineError
from gspo.rollout.workers.connection import WorkerDied
from gspo.rollout.workers.worker import EngineSpec, RolloutWorker
from tests.distributed.ray.waiting import wait_until
from tests.distributed.ray.workers import Odd

SPEC = EngineSpec("none", "none", "none", 1, 8, (0,), 0)


class Echo(RolloutWorker):
    """Answers without an engine."""

    def __init__(self, spec: EngineSpec) -> None:
        if spec.model == "missing":
            raise EngineError("model 'missing' cannot run here")
        self.calls: list = []

    def note(self, x):
        self.calls.append(x)
        return list(self.calls)

    def fail(self):
        raise ValueError("prompt 'p': no tokens")

    def puzzle(self):
        raise Odd("one", "two")

    def hang(self):
        import time

        time.sleep(1000)

    def mean(self, weights, version):
        return version, {
            name: (float(t.float().mean()), str(t.dtype), tuple(t.shape)) for name, t in weights.items()
        }

    def close(self):
        pass


@pytest.fixture
def connection(cluster):
    connection = RayConnection(SPEC, {"num_cpus": 1}, Echo, "rollout worker 3")
    yield connection
    connection.close()


def test_calls_are_answered_in_order_until_the_worker_is_killed(connection):
    tickets = [connection.send("note", x) for x in range(3)]
    assert [t.result(60) for t in tickets] == [[0], [0, 1], [0, 1, 2]]
    with pytest.raises(ValueError, match=r"^prompt 'p': no tokens"):
        connection.send("fail").result(30)
    with pytest.raises(WorkerError, match=r"^Odd: onetwo(.|\n)*in puzzle"):
        connection.send("puzzle").result(30)
    assert connection.alive and connection.send("note", 3).result(30) == [0, 1, 2, 3]
    tensors = {
        "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
        "b": torch.full((4,), 2.5, dtype=torch.bfloat16),
        "c": torch.tensor(7, dtype=torch.int64),
    }
    store = ObjectStore()
    ref = store.publish(tensors, 4)
    tensors["a"].zero_()  # the version is a copy
    version, seen = connection.send("mean", ref, 4).result(30)
    assert version == 4
    assert seen == {
        "a": (2.5, "torch.float32", (2, 3)),
        "b": (2.5, "torch.bfloat16", (4,)),
        "c": (7.0, "torch.int64", ()),
    }
    store.discard(ref)
    store.close()
    check_death(connection)


def wait_for(condition, seconds: float = 60.0) -> None:
    """Until it holds; a call takes a moment to reach its actor."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.2)


def check_death(connection):
    """A killed worker fails all its tickets and is known to be dead."""
    pid = connection.send("ping").result(30)
    hanging, waiting = connection.send("hang"), connection.send("note", 1)
    wait_for(lambda: "sleep(1000)" in connection.stacks())
    os.kill(pid, signal.SIGKILL)
    for ticket in (hanging, waiting):
        with pytest.raises(WorkerDied, match=r"^rollout worker 3 died"):
            ticket.result(30)
    assert not connection.alive
    with pytest.raises(WorkerDied, match=r"^rollout worker 3 died"):
        connection.send("note", 2).result(1)


def test_object_weights_are_a_mapping_to_the_bit():
    tensors = {"w": torch.randn(3, 5), "h": torch.randn(2, 2).to(torch.bfloat16)}
    packed = ObjectWeights(tensors)
    assert list(packed) == ["w", "h"] and len(packed) == 2
    assert all(torch.equal(packed[name], tensors[name]) for name in tensors)


@pytest.mark.slow
def test_an_idle_worker_s_death_is_noticed_without_a_call(connection):
    os.kill(connection.send("ping").result(30), signal.SIGKILL)
    assert wait_until(lambda: not connection.alive)


def test_kill_gives_the_reason(connection):
    hanging = connection.send("hang")
    connection.kill("it gave no answer")
    with pytest.raises(WorkerDied, match=r"^rollout worker 3: it gave no answer"):
        hanging.result(30)
    connection.close()
    connection.close()


@pytest.mark.slow
def test_an_engine_that_cannot_be_built_says_so_itself(cluster):
    spec = EngineSpec("none", "missing", "none", 1, 8, (0,), 0)
    connection = RayConnection(spec, {"num_cpus": 1}, Echo)
    with pytest.raises(EngineError, match=r"^model 'missing' cannot run here"):
        connection.send("ping").result(30)
    connection.close()


def test_tensors_come_through_ray_as_they_were_in_memory_of_their_own(cluster):
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
