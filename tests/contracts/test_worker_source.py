"""The WorkerSource contract, run on processes and on threads."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from gspo.processes import children_of, is_alive
from gspo.rewards.pool.fork_server import MAX_STARTS
from gspo.rewards.pool.workers import ForkedWorkers, ThreadWorkers
from tests.contracts.worker_source import WorkerSourceContract, ask, build_handler, send
from tests.faults.reward_rows import processes_of_session


class TestForkedWorkers(WorkerSourceContract):
    @pytest.fixture
    def source(self) -> Iterator[ForkedWorkers]:
        source = ForkedWorkers("tests.contracts.worker_source:build_handler", ())
        yield source
        source.close()
        assert processes_of_session(source.pid) == []

    def test_a_worker_is_a_child_of_the_server_until_it_is_stopped(self, source: ForkedWorkers) -> None:
        workers = source.start(2)
        assert set(children_of(source.pid)) == {worker.pid for worker in workers}
        send(workers[0], "hang")
        assert source.stop(workers[0]) == "its process was killed by SIGKILL"
        assert children_of(source.pid) == [workers[1].pid] and not is_alive(workers[0].pid)

    def test_a_killed_server_is_replaced_at_the_next_start(self, source: ForkedWorkers) -> None:
        (first,), server = source.start(1), source.pid
        os.kill(server, signal.SIGKILL)
        (second,) = source.start(1)
        assert source.pid != server and ask(second, 1) == {"result": {"payload": 1}}
        assert "ended with an earlier reward server" in source.stop(first)

    def test_one_request_starts_a_bounded_number(self, source: ForkedWorkers) -> None:
        assert len(source.start(MAX_STARTS + 1)) == MAX_STARTS


class TestThreadWorkers(WorkerSourceContract):
    @pytest.fixture
    def source(self) -> ThreadWorkers:
        return ThreadWorkers(*build_handler())

    def test_a_stopped_worker_that_was_idle_ends(self, source: ThreadWorkers) -> None:
        (worker,) = source.start(1)
        ask(worker, 1)
        assert source.pid == 0 and worker.thread is not None
        source.stop(worker)
        worker.thread.join(timeout=60)
        assert not worker.thread.is_alive()
