"""What the pool does with each job and worker, one event at a time: the tests are the workers."""

from __future__ import annotations

import contextlib
import json
import pickle
import queue
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest

from gspo.rewards.pool.frames import MAX_FRAME, Channel, pack, receive, send
from gspo.rewards.pool.worker_pool import JobFailed, WorkerPool
from gspo.rewards.pool.workers import Worker, WorkerSource
from gspo.rewards.protocol import RewardError

LONG = 20.0  # seconds that nothing here takes


class Peer:
    """The worker's side of a channel, in the hands of a test."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.settimeout(LONG)

    def job(self) -> Any:
        return pickle.loads(receive(self.sock))

    def answer(self, content: Any) -> None:
        send(self.sock, content if isinstance(content, bytes) else json.dumps(content).encode())

    def die(self) -> None:
        self.sock.close()


class HeldWorkers(WorkerSource):
    """Hands the other end of each worker to the test, and notes what the pool asks for."""

    what = "test"

    def __init__(self, *, ready: bool = True, stack: str = "") -> None:
        self.info, self._ready, self._stack = None, ready, stack
        self.peers: queue.Queue[Peer] = queue.Queue()
        self.asked: list[tuple[str, int]] = []
        self.events: queue.Queue[str] = queue.Queue()

    def start(self, num_workers: int) -> list[Worker]:
        self.asked.append(("start", num_workers))
        workers = []
        for _ in range(num_workers):
            ours, theirs = socket.socketpair()
            self.peers.put(Peer(theirs))
            workers.append(Worker(Channel(ours), ready=self._ready))
        return workers

    def stop(self, worker: Worker) -> str:
        worker.channel.sock.close()
        self.events.put("stop")
        return "it went away"

    def kill(self, worker: Worker) -> None:
        self.events.put("kill")

    def request_stack(self, worker: Worker) -> None:
        self.events.put("request_stack")

    def stack(self, worker: Worker) -> str:
        self.events.put("stack")
        return self._stack

    def lower_priority(self, worker: Worker) -> None:
        self.events.put("lower_priority")

    def close(self) -> None:
        self.events.put("close")

    def peer(self) -> Peer:
        return self.peers.get(timeout=LONG)


@pytest.fixture
def make() -> Iterator[Callable[..., tuple[WorkerPool, HeldWorkers]]]:
    with contextlib.ExitStack() as stack:

        def pool(**settings: Any) -> tuple[WorkerPool, HeldWorkers]:
            source = HeldWorkers(ready=settings.pop("ready", True), stack=settings.pop("stack", ""))
            made = WorkerPool(source, **{"num_workers": 1, "timeout": LONG, **settings})
            stack.callback(made.close)
            return made, source

        yield pool


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_a_job_is_tried_again_after_a_death_as_often_as_was_set(make, retries):
    pool, source = make(retries=retries)
    lost, next_job = pool.submit("lost"), pool.submit("next")
    for _ in range(retries + 1):
        peer = source.peer()
        assert peer.job() == "lost"  # before the one that waits behind it
        peer.die()
    with pytest.raises(JobFailed, match=rf"the worker died on it {retries + 1} times; the last time it went away"):
        lost.result(LONG)
    peer = source.peer()
    assert peer.job() == "next"
    peer.answer({"result": 7})
    assert next_job.result(LONG) == 7
    assert (pool.counts.done, pool.counts.started, pool.counts.timeouts) == (1, retries + 2, 0)


def test_a_worker_runs_one_job_after_another_in_the_order_of_submission(make):
    pool, source = make()
    futures = [pool.submit(number) for number in range(5)]
    peer = source.peer()
    for number in range(5):
        assert peer.job() == number
        peer.answer({"result": [number]})
    assert [future.result(LONG) for future in futures] == [[number] for number in range(5)]
    assert (pool.counts.done, pool.counts.started) == (5, 1) and source.asked == [("start", 1)]


def test_an_idle_worker_that_dies_costs_no_job_a_try(make):
    pool, source = make(retries=0)
    first = pool.submit("first")
    peer = source.peer()
    peer.answer({"result": peer.job()})
    assert first.result(LONG) == "first"
    peer.die()
    assert source.events.get(timeout=LONG) == "stop"
    second = pool.submit("second")
    peer = source.peer()
    peer.answer({"result": peer.job()})
    assert second.result(LONG) == "second"


def test_workers_are_started_for_queued_jobs_up_to_the_size_of_the_pool(make):
    pool, source = make(num_workers=2)
    one = pool.submit("one")
    first = source.peer()
    assert first.job() == "one"
    others = [pool.submit(name) for name in ("two", "three")]
    second = source.peer()
    assert second.job() == "two"
    second.answer({"result": 2})
    assert second.job() == "three"
    second.answer({"result": 3})
    first.answer({"result": 1})
    assert [f.result(LONG) for f in (one, *others)] == [1, 2, 3]
    assert source.asked == [("start", 1), ("start", 1)] and pool.counts.started == 2


def test_a_cancelled_job_is_left_out_and_a_running_one_cannot_be_cancelled(make):
    pool, source = make()
    running = pool.submit("running")
    peer = source.peer()
    assert peer.job() == "running" and not running.cancel()
    cancelled, kept = pool.submit("cancelled"), pool.submit("kept")
    assert cancelled.cancel()
    peer.answer({"result": 0})
    assert peer.job() == "kept"
    peer.answer({"result": 1})
    assert (running.result(LONG), kept.result(LONG)) == (0, 1)
    with pytest.raises(CancelledError):
        cancelled.result(LONG)


@pytest.mark.parametrize(
    ("answer", "result", "reason"),
    [
        ({"result": None}, None, None),
        ({"result": {"score": 0.5}, "error": None}, {"score": 0.5}, None),
        ({"result": 1, "error": "ValueError: no"}, None, "ValueError: no"),
        ({"error": ""}, None, ""),
        (b"\xff\x00", None, "the worker's answer was not JSON"),
        ([1, 2], None, "the worker's answer was not JSON"),
        (b"[" * 100_000, None, "the worker's answer was not JSON"),
    ],
)
def test_an_answer_is_a_result_or_an_error_and_the_worker_goes_on(make, answer, result, reason):
    pool, source = make()
    future = pool.submit("a job")
    peer = source.peer()
    peer.job()
    peer.answer(answer)
    if reason is None:
        assert future.result(LONG) == result
    else:
        with pytest.raises(JobFailed) as caught:
            future.result(LONG)
        assert str(caught.value) == reason
    again = pool.submit("another")
    assert peer.job() == "another"
    peer.answer({"result": 2})
    assert again.result(LONG) == 2 and pool.counts.started == 1


def test_an_answer_that_is_announced_too_long_is_a_death(make):
    pool, source = make(retries=0)
    future = pool.submit("a job")
    peer = source.peer()
    peer.job()
    peer.sock.sendall((MAX_FRAME + 1).to_bytes(4, "big"))
    with pytest.raises(JobFailed, match="the worker died on it 1 times"):
        future.result(LONG)


def test_a_payload_and_an_answer_larger_than_the_buffers_arrive_whole(make):
    pool, source = make()
    payload = bytes(range(256)) * 20_000
    future = pool.submit(payload)
    peer = source.peer()
    assert peer.job() == payload
    peer.answer({"result": "x" * 3_000_000})
    assert future.result(LONG) == "x" * 3_000_000


def test_a_worker_that_loads_first_gets_its_job_when_it_is_ready(make):
    pool, source = make(num_workers=4, ready=False)
    future = pool.submit("a job")
    loading = source.peer()
    second = pool.submit("another")
    other = source.peer()
    other.answer({})
    assert other.job() == "a job"
    other.answer({"result": 1})
    assert other.job() == "another"  # while the first one is still loading
    other.answer({"result": 2})
    assert (future.result(LONG), second.result(LONG)) == (1, 2)
    loading.answer({})
    assert pool.counts.started == 2


def test_three_workers_in_a_row_that_do_not_start_fail_all_queued_jobs_and_the_count_begins_again(make):
    pool, source = make(ready=False)
    for _ in range(2):
        futures = [pool.submit(number) for number in range(3)]
        for _ in range(3):
            assert not any(future.done() for future in futures)
            source.peer().die()
        for future in futures:
            with pytest.raises(
                JobFailed, match="three test workers in a row did not start; the last one: it went away"
            ):
                future.result(LONG)
    futures = [pool.submit(number) for number in range(2)]
    for _ in range(2):
        source.peer().die()
    peer = source.peer()
    peer.answer({})  # one that starts ends the row
    assert peer.job() == 0
    peer.die()
    for _ in range(2):
        source.peer().die()
    peer = source.peer()
    peer.answer({})
    for number in range(2):
        assert peer.job() == number
        peer.answer({"result": -number})
    assert [future.result(LONG) for future in futures] == [0, -1]


@pytest.mark.parametrize("stack", ["", "line 3 in score"])
def test_a_job_past_its_deadline_fails_with_its_stack_and_another_worker_runs_the_next(make, stack):
    pool, source = make(timeout=0.05, stack=stack)
    late = pool.submit("late")
    peer = source.peer()
    assert peer.job() == "late"
    reason = "no result within 0.05 s; its worker was stopped" + (f". It was at\n{stack}" if stack else "")
    with pytest.raises(JobFailed) as caught:
        late.result(LONG)
    assert str(caught.value) == reason
    assert [source.events.get(timeout=LONG) for _ in range(3)] == ["request_stack", "stack", "kill"]
    peer.die()  # what the kill does
    assert source.events.get(timeout=LONG) == "stop"
    assert (pool.counts.timeouts, pool.counts.done) == (1, 0) and pool.counts.latest_kill >= 0


def test_a_pool_whose_workers_cannot_be_started_fails_its_jobs_with_the_reason(make):
    pool, source = make()

    def broken(num_workers: int) -> list[Worker]:
        raise RewardError("the test process ended while loading")

    source.start = broken
    reason = "the test pool stopped: RewardError: the test process ended while loading"
    with pytest.raises(RewardError, match=reason):
        pool.submit("a job").result(LONG)
    assert source.events.get(timeout=LONG) == "close"
    with pytest.raises(RewardError, match=reason):
        pool.submit("later")
    pool.close()


def test_closing_while_the_thread_ends_by_itself_is_no_error(make):
    pool, _ = make()
    pool.close()
    pool._closing = False  # as a thread sees it that asks just before the end
    pool.close()
    pool._closing = False
    assert not pool.submit("late").done()


def test_closing_fails_queued_and_running_jobs_and_ends_every_worker(make):
    pool, source = make()
    running, queued = pool.submit("running"), pool.submit("queued")
    assert source.peer().job() == "running"
    pool.close()
    for future in (running, queued):
        with pytest.raises(JobFailed, match=r"^the test pool was closed$"):
            future.result(0)
    assert [source.events.get_nowait() for _ in range(2)] == ["stop", "close"] and source.events.empty()


def test_a_channel_gives_whole_messages_one_by_one_however_they_arrive():
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    assert channel.read() is None
    message = pack(b"hello")
    for byte in message[:-1]:
        theirs.sendall(bytes([byte]))
        assert channel.read() is None and channel.has_more
    theirs.sendall(message[-1:] + pack(b"") + pack(b"again")[:3])
    assert channel.read() == b"hello" and channel.has_more
    theirs.sendall(pack(b"again")[3:])
    assert channel.read() == b"" and channel.has_more
    theirs.sendall(pack(b"last"))
    assert channel.read() == b"again" and channel.has_more
    theirs.close()
    with pytest.raises(EOFError):
        channel.read()
