"""A worker in a process of its own: answers, ends and what is left after each."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from gspo.processes import WorkerError
from gspo.rollout.engine import EngineError
from gspo.rollout.workers.connection import WorkerDied
from gspo.rollout.workers.process import ProcessConnection
from gspo.rollout.workers.weight_store import SharedWeights, read_weights
from tests.rollout.workers.processes import exists, shared_memory, wait_until, workers
from tests.rollout.workers.toy_engine import make_spec


@pytest.fixture(autouse=True)
def nothing_left():
    before = shared_memory()
    yield
    assert wait_until(lambda: not workers(), 10), "a worker process was left"
    assert shared_memory() == before


@pytest.fixture
def connection(tmp_path):
    connection = ProcessConnection(make_spec(), 3, tmp_path / "log")
    yield connection
    connection.close()


def test_calls_are_answered_in_order_by_another_process(connection):
    tickets = [connection.send("generate", [i]) for i in range(50)]
    assert [t.result(30) for t in tickets] == [[i] for i in range(50)]
    assert connection.send("ping").result(5) == connection.pid != os.getpid()
    assert connection.alive and connection.name == f"rollout worker 3 (process {connection.pid})"


def test_a_killed_worker_fails_every_open_call_with_how_it_ended(connection):
    connection.send("ping").result(30)
    open_calls = [connection.send("generate", ["hang"]), connection.send("ping")]
    os.kill(connection.pid, signal.SIGKILL)
    for ticket in [*open_calls, connection.send("ping")]:
        with pytest.raises(WorkerDied, match=r"^rollout worker 3 .*killed by SIGKILL"):
            ticket.result(30)
    assert not connection.alive


def test_a_worker_that_exits_says_its_status_and_the_end_of_its_log(tmp_path):
    connection = ProcessConnection(make_spec(exit=True), 0, tmp_path / "log")
    with pytest.raises(WorkerDied, match="exited with status 3") as died:
        connection.send("ping").result(30)
    assert "no such device" in str(died.value) and "no such device" in (tmp_path / "log").read_text()
    connection.close()


def test_errors_arrive_as_themselves_where_they_can(connection):
    with pytest.raises(AttributeError, match="no_such_method"):
        connection.send("no_such_method").result(30)
    with pytest.raises(WorkerError, match="onetwo") as error:
        connection.send("generate", ["fail"]).result(5)
    assert "toy_engine.py" in str(error.value), "the traceback of the other process"
    assert connection.send("ping").result(5), "an error does not end the worker"


def test_an_engine_that_cannot_be_built_answers_every_call_with_why():
    connection = ProcessConnection(make_spec(refuse=True))
    for method in ("ping", "step"):
        with pytest.raises(EngineError, match="too short"):
            connection.send(method).result(30)
    connection.close()


def test_kill_ends_a_worker_that_hangs_or_is_stopped_and_what_it_started(connection):
    (child,) = connection.send("generate", ["child"]).result(30)
    assert exists(child)
    ticket = connection.send("generate", ["hang"])
    os.kill(connection.pid, signal.SIGSTOP)
    connection.send("generate", ["x" * 1_000_000])  # more than the socket holds: nobody may wait for it
    connection.kill("it gave no answer")
    with pytest.raises(WorkerDied, match="it gave no answer"):
        ticket.result(30)
    assert wait_until(lambda: not exists(child))


def test_close_is_quick_may_come_twice_and_ends_one_that_does_not_listen(connection, monkeypatch):
    from gspo.rollout.workers import process as process_connection

    monkeypatch.setattr(process_connection, "CLOSE_SECONDS", 0.5)
    connection.send("ping").result(30)
    os.kill(connection.pid, signal.SIGSTOP)
    connection.close()
    connection.close()
    assert not exists(connection.pid)


def test_stacks_show_what_the_worker_does(connection):
    connection.send("ping").result(30)
    connection.send("generate", ["hang"])
    assert wait_until(lambda: "in generate" in connection.stacks(), 10)
    connection.kill()


def test_a_worker_dies_with_its_trainer_even_when_it_is_stopped(tmp_path):
    code = (
        "import os, signal, sys; from gspo.rollout.workers.process import ProcessConnection\n"
        "from tests.rollout.workers.toy_engine import make_spec\n"
        "a, b = ProcessConnection(make_spec()), ProcessConnection(make_spec())\n"
        "print(a.send('ping').result(), b.send('ping').result(), flush=True)\n"
        "os.kill(b.pid, signal.SIGSTOP); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2 and wait_until(lambda: not any(map(exists, pids)), 10)


@pytest.mark.parametrize("named", [False, True])
def test_published_weights_are_a_safetensors_file_of_the_moment(named, monkeypatch):
    if named:  # where there is no memory without a name
        monkeypatch.delattr(os, "memfd_create")
    tensors = {
        "a": torch.randn(5, 7),
        "half": torch.randn(3).to(torch.bfloat16),
        "flags": torch.tensor([True, False, True]),
        "turned": torch.randn(4, 6).T,
        "nothing": torch.zeros(0, 3),
        "one": torch.tensor(2.5),
    }
    expected = {name: t.clone() for name, t in tensors.items()}
    store = SharedWeights()
    ref = store.publish(tensors, 7)
    tensors["a"].zero_()
    with read_weights(ref) as read:
        assert read is not None and read.keys() == expected.keys()
        assert all(torch.equal(read[name], t) and read[name].dtype == t.dtype for name, t in expected.items())
    second = store.publish(tensors, 8)
    store.discard(ref)
    assert not Path(ref.path).exists()
    assert torch.equal(load_file(second.path)["a"], torch.zeros(5, 7))
    store.close()
    assert not Path(second.path).exists()


def test_weights_that_are_no_file_are_given_as_they_are():
    tensors = {"a": torch.ones(2)}
    for ref in (tensors, None):
        with read_weights(ref) as read:
            assert read is ref
