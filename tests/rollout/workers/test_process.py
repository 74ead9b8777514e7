"""A worker in a process of its own: how it ends and what is left after that. The rest is in tests/contracts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from gspo.rollout.workers import process
from gspo.rollout.workers.connection import WorkerDied
from gspo.rollout.workers.process import ProcessConnection
from gspo.rollout.workers.worker import RolloutWorker
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


def test_the_worker_is_another_process_named_in_messages(connection):
    assert connection.send(RolloutWorker.ping).result(30) == connection.pid != os.getpid()
    assert connection.name == f"rollout worker 3 (process {connection.pid})"


def test_a_killed_worker_fails_every_open_call_with_the_signal(connection):
    connection.send(RolloutWorker.ping).result(30)
    calls = [connection.send(RolloutWorker.generate, ["hang"]), connection.send(RolloutWorker.ping)]
    os.kill(connection.pid, signal.SIGKILL)
    for answer in [*calls, connection.send(RolloutWorker.ping)]:
        with pytest.raises(WorkerDied, match=r"^rollout worker 3 .*killed by SIGKILL"):
            answer.result(30)


def test_a_worker_that_exits_says_its_status_and_the_end_of_its_log(tmp_path):
    connection = ProcessConnection(make_spec(exit=True), 0, tmp_path / "log")
    with pytest.raises(WorkerDied, match="exited with status 3") as died:
        connection.send(RolloutWorker.ping).result(30)
    assert "no such device" in str(died.value) and "no such device" in (tmp_path / "log").read_text()
    connection.close()


def test_kill_ends_a_worker_that_is_stopped_and_its_child_processes(connection):
    (child,) = connection.send(RolloutWorker.generate, ["child"]).result(30)
    assert exists(child)
    answer = connection.send(RolloutWorker.generate, ["hang"])
    os.kill(connection.pid, signal.SIGSTOP)
    # More than the socket holds: no caller may wait for it.
    connection.send(RolloutWorker.generate, ["x" * 1_000_000])
    connection.kill("it gave no answer")
    with pytest.raises(WorkerDied, match="it gave no answer"):
        answer.result(30)
    assert wait_until(lambda: not exists(child))


def test_close_ends_a_worker_that_does_not_listen(connection, monkeypatch):
    monkeypatch.setattr(process, "CLOSE_SECONDS", 0.5)
    connection.send(RolloutWorker.ping).result(30)
    os.kill(connection.pid, signal.SIGSTOP)
    connection.close()
    assert not exists(connection.pid)


def test_a_worker_dies_with_its_trainer_even_when_it_is_stopped():
    code = (
        "import os, signal, sys; from gspo.rollout.workers.process import ProcessConnection\n"
        "from gspo.rollout.workers.worker import RolloutWorker\n"
        "from tests.rollout.workers.toy_engine import make_spec\n"
        "a, b = ProcessConnection(make_spec()), ProcessConnection(make_spec())\n"
        "print(*(c.send(RolloutWorker.ping).result() for c in (a, b)), flush=True)\n"
        "os.kill(b.pid, signal.SIGSTOP); os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr
    pids = [int(word) for word in done.stdout.split()]
    assert len(pids) == 2 and wait_until(lambda: not any(map(exists, pids)), 10)
