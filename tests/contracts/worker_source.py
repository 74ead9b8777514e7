"""What every WorkerSource of the reward pool must do. A test class derives from WorkerSourceContract."""

from __future__ import annotations

import json
import pickle
import select
import time
from collections.abc import Callable
from typing import Any

from gspo.rewards.pool.frames import pack
from gspo.rewards.pool.workers import Worker, WorkerSource

PATIENCE = 60.0
INFO = {"made_by": "contract"}


def build_handler() -> tuple[Callable[[Any], Any], dict[str, str]]:
    """A factory as `ForkedWorkers` imports it: the handler, and the info for the pool."""

    def handle(payload: Any) -> Any:
        if payload == "raise":
            raise LookupError("as asked")
        if payload == "hang":
            wait_in_vain()
        return {"payload": payload}

    return handle, INFO


def wait_in_vain() -> None:
    time.sleep(3600)


def send(worker: Worker, payload: Any) -> None:
    worker.channel.outgoing += pack(pickle.dumps(payload))
    while worker.channel.outgoing:
        worker.channel.write()


def receive(worker: Worker) -> Any:
    """The next answer of a worker."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        select.select([worker.channel.sock], [], [], end - time.monotonic())
        if (data := worker.channel.read()) is not None:
            return json.loads(data)
    raise AssertionError("no answer")


def ask(worker: Worker, payload: Any) -> Any:
    send(worker, payload)
    return receive(worker)


class WorkerSourceContract:
    """`source` is a fixture; its workers run the handler of `build_handler`."""

    def test_the_info_of_the_factory_is_known(self, source: WorkerSource) -> None:
        assert source.info == INFO

    def test_workers_answer_each_payload_on_their_own_channel(self, source: WorkerSource) -> None:
        workers = source.start(3)
        assert 1 <= len(workers) <= 3 and all(worker.ready for worker in workers)
        for number, worker in enumerate(workers):
            send(worker, number)
        for number, worker in reversed(list(enumerate(workers))):
            assert receive(worker) == {"result": {"payload": number}}
            assert ask(worker, ["again", number]) == {"result": {"payload": ["again", number]}}

    def test_a_large_payload_and_answer_arrive_whole(self, source: WorkerSource) -> None:
        (worker,) = source.start(1)
        text = "x" * (3 << 20)
        assert ask(worker, text) == {"result": {"payload": text}}

    def test_an_error_of_the_handler_is_an_answer_and_the_worker_goes_on(self, source: WorkerSource) -> None:
        (worker,) = source.start(1)
        error = ask(worker, "raise")["error"]
        assert "LookupError: as asked" in error and "worker_source.py" in error
        assert ask(worker, 1) == {"result": {"payload": 1}}

    def test_the_stack_shows_where_a_worker_hangs(self, source: WorkerSource) -> None:
        (worker,) = source.start(1)
        ask(worker, 1)
        send(worker, "hang")
        end = time.monotonic() + PATIENCE
        while "wait_in_vain" not in source.stack(worker):
            assert time.monotonic() < end, source.stack(worker)
            source.request_stack(worker)
            time.sleep(0.02)

    def test_stop_ends_a_worker_that_hangs_and_no_other(self, source: WorkerSource) -> None:
        stuck, other = (source.start(1)[0] for _ in range(2))
        send(stuck, "hang")
        source.lower_priority(stuck)
        source.kill(stuck)
        assert source.stop(stuck)
        assert stuck.channel.sock.fileno() == -1
        assert ask(other, 2) == {"result": {"payload": 2}}
        (third,) = source.start(1)
        assert ask(third, 3) == {"result": {"payload": 3}}

    def test_close_may_come_twice(self, source: WorkerSource) -> None:
        source.start(2)
        source.close()
        source.close()
