"""What every Connection must do. A test class derives from ConnectionContract and gives it a `connect` fixture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gspo.processes import WorkerError
from gspo.rollout.engine import EngineError
from gspo.rollout.workers.connection import Connection, WorkerDied
from gspo.rollout.workers.worker import RolloutWorker
from tests.rollout.workers.processes import wait_until

START = 60  # seconds for a worker to start
Connect = Callable[..., Connection]


class ConnectionContract:
    """`connect(**options)` starts `rollout worker 3` over a ToyEngine with these options."""

    @pytest.fixture
    def connection(self, connect: Connect) -> Connection:
        return connect()

    def test_calls_are_answered_in_order(self, connection: Any) -> None:
        answers = [connection.send(RolloutWorker.generate, [i]) for i in range(50)]
        assert [answer.result(START) for answer in answers] == [[i] for i in range(50)]
        assert connection.alive and connection.name.startswith("rollout worker 3")

    def test_errors_arrive_as_themselves_where_they_can_and_do_not_end_the_worker(self, connection: Any) -> None:
        with pytest.raises(ValueError, match=r"^prompt 'p': no tokens"):
            connection.send(RolloutWorker.generate, ["refuse"]).result(START)
        with pytest.raises(WorkerError, match=r"^Unpicklable: onetwo(.|\n)*toy_engine\.py"):
            connection.send(RolloutWorker.generate, ["fail"]).result(5)
        assert connection.alive and connection.send(RolloutWorker.generate, [1]).result(5) == [1]

    def test_an_engine_that_cannot_be_built_answers_every_call_with_the_error(self, connect: Connect) -> None:
        connection: Any = connect(refuse=True)
        for method in (RolloutWorker.ping, RolloutWorker.step):
            with pytest.raises(EngineError, match="max_length=8 is too short"):
                connection.send(method).result(START)

    def test_a_worker_that_ends_fails_every_open_call_and_every_later_one(self, connection: Any) -> None:
        calls = [connection.send(RolloutWorker.generate, [word]) for word in ("die", "hang", "other")]
        for answer in calls:
            with pytest.raises(WorkerDied, match=r"^rollout worker 3"):
                answer.result(START)
        assert not connection.alive
        with pytest.raises(WorkerDied, match=r"^rollout worker 3"):
            connection.send(RolloutWorker.ping).result(5)

    def test_kill_ends_a_worker_that_hangs_and_gives_the_reason(self, connection: Any) -> None:
        connection.send(RolloutWorker.ping).result(START)
        calls = [connection.send(RolloutWorker.generate, [word]) for word in ("hang", "other")]
        connection.kill("it gave no answer")
        for answer in [*calls, connection.send(RolloutWorker.ping)]:
            with pytest.raises(WorkerDied, match=r"^rollout worker 3.*: it gave no answer"):
                answer.result(START)
        assert not connection.alive

    def test_stacks_show_what_the_worker_does(self, connection: Any) -> None:
        connection.send(RolloutWorker.ping).result(START)
        connection.send(RolloutWorker.generate, ["hang"])
        assert wait_until(lambda: "in generate" in connection.stacks())

    def test_close_ends_the_worker_and_may_come_twice(self, connection: Any) -> None:
        connection.send(RolloutWorker.ping).result(START)
        connection.close()
        connection.close()
        assert not connection.alive
        with pytest.raises(WorkerDied, match=r"^rollout worker 3"):
            connection.send(RolloutWorker.ping).result(5)
