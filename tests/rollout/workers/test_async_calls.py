"""The calls that an asynchronous fleet makes, answer by answer, without threads."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from gspo.rollout.engine import GroupRequest
from gspo.rollout.workers import async_fleet, worker_slot
from gspo.rollout.workers.async_fleet import AsyncFleet
from gspo.rollout.workers.worker import RolloutWorker
from gspo.types import Group
from tests.rollout.models import make_request
from tests.rollout.workers.faulty_fleet import scripted
from tests.rollout.workers.hand_connection import HandConnection
from tests.rollout.workers.thread_connection import NoWeights, no_weights


def group_of(request: GroupRequest) -> Group:
    (group,) = scripted().generate([request])
    return group


class Office:
    """A fleet of two workers that answer pumps when told."""

    def __init__(self, num_workers: int = 2, building: int | None = None) -> None:
        self._building = building  # the worker whose engine is not built
        self.connections: list[HandConnection] = []
        self.store, self.messages = NoWeights(), []
        self.fleet = AsyncFleet(
            self._connect, num_workers, weights=no_weights, store=self.store, notify=self.messages.append, version=4
        )

    def _connect(self, index: int) -> HandConnection:
        nothing = dict.fromkeys(("load_weights", "submit"), lambda *_: None)
        answers = {"ping": lambda: 1, "unfinished": dict, "take_back": dict, "generate": scripted().generate, **nothing}
        if index == self._building:
            answers = {name: answer for name, answer in answers.items() if name not in ("ping", "load_weights")}
        self.connections.append(HandConnection(index, answers))
        return self.connections[-1]

    def submitted(self, worker: int) -> list[int]:
        calls = self.connections[worker].calls
        return [request.submission for name, args in calls if name == "submit" for request in args[0]]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_fleet, "STEP_SECONDS", 0.0)
    monkeypatch.setattr(async_fleet, "POLL_SECONDS", 0.001)


def test_groups_go_to_the_worker_with_the_fewest_responses() -> None:
    office = Office()
    for number, n in enumerate((4, 1, 1, 1, 2, 1)):
        office.fleet.submit(make_request(number, n=n))
    assert [office.submitted(worker) for worker in (0, 1)] == [[0, 5], [1, 2, 3, 4]]
    assert office.fleet.num_in_flight == 6


def test_weights_come_before_groups_and_two_pumps_wait_at_a_worker_with_groups() -> None:
    office = Office()
    office.fleet.submit(make_request(0))
    assert office.connections[0].names() == ["ping", "load_weights", "submit", "pump", "pump"]
    assert office.connections[1].names() == ["ping", "load_weights"]
    assert office.connections[0].calls[1][1][1] == 4 and office.store.published == [4]
    office.connections[0].answer("pump", [])
    assert office.connections[0].num_open("pump") == 2
    office.connections[0].answer("pump", [group_of(make_request(0))])
    assert office.connections[0].num_open("pump") == 1, "nothing is in flight there any more"
    office.fleet.submit(make_request(1))
    assert office.submitted(0) == [0, 1] and office.connections[0].num_open("pump") == 2


def test_finished_groups_come_out_once_in_order_and_count_until_then() -> None:
    office = Office()
    requests = [make_request(number) for number in range(4)]
    for request in requests:
        office.fleet.submit(request)
    office.connections[1].answer("pump", [group_of(requests[3]), group_of(requests[1])])
    office.connections[0].answer("pump", [group_of(requests[0])])
    assert office.fleet.num_in_flight == 4
    state = office.fleet.unfinished()
    assert [r.submission for r in state] == [0, 1, 2, 3]
    assert [len(r.partial) for r in state] == [2, 2, 0, 2] and state[0].partial == group_of(requests[0]).rollouts
    assert [g.submission for g in office.fleet.step()] == [0, 1, 3]
    assert office.fleet.step() == [] and office.fleet.num_in_flight == 1
    office.fleet.clear()
    assert office.fleet.num_in_flight == 0 and [r.submission for r in office.fleet.unfinished()] == []


def test_what_workers_have_begun_is_part_of_the_state() -> None:
    office = Office(num_workers=1)
    office.fleet.submit(make_request(0))
    begun = make_request(0, version=9)
    office.connections[0]._at_once["unfinished"] = lambda: {0: begun}
    assert office.fleet.unfinished() == [begun]


def test_a_new_worker_gets_weights_and_groups_again_and_the_answers_of_the_old_one_are_dropped() -> None:
    office = Office(num_workers=1)
    for number in range(2):
        office.fleet.submit(make_request(number))
    old = office.connections[0]
    late = next(answer for name, answer in old._open if name == "pump")
    old._open = [pair for pair in old._open if pair[1] is not late]
    old.answer("pump", RuntimeError("struck"))
    while len(office.connections) < 2:
        office.fleet.step()
    new = office.connections[1]
    assert new.names() == ["ping", "load_weights", "submit", "pump", "pump"] and office.submitted(1) == [0, 1]
    late.set_result([group_of(make_request(0))])
    assert office.fleet.step() == [] and office.fleet.num_in_flight == 2
    new.answer("pump", [group_of(make_request(0)), group_of(make_request(1))])
    assert [g.submission for g in office.fleet.step()] == [0, 1]
    assert "RuntimeError: struck" in office.messages[0] and "its 2 groups" in office.messages[0]


def test_an_evaluation_is_spread_over_the_workers_and_comes_back_in_order() -> None:
    office = Office()
    requests = [make_request(number) for number in (9, 3, 7, 1, 5)]
    assert office.fleet.generate(requests) == [group_of(request) for request in requests]
    shares = [[r.submission for r in c.calls[-1][1][0]] for c in office.connections]
    assert shares == [[9, 7, 5], [3, 1]] and office.fleet.generate([]) == []


def test_an_evaluation_may_take_ten_timeouts() -> None:
    office = Office(num_workers=1)
    (slot,) = office.fleet.slots
    seen: list[float] = []
    slot.is_overdue = lambda since, num_timeouts=1.0: bool(seen.append(num_timeouts))  # pyright: ignore
    office.fleet.submit(make_request(0))
    office.fleet.step()
    del office.connections[0]._at_once["generate"]
    office.fleet._send(slot, async_fleet.RolloutWorker.generate, [])
    office.fleet.step()
    office.connections[0].answer("generate", [])
    office.fleet.step()
    assert seen == [1.0, 10.0, 1.0]


def test_a_version_is_freed_when_every_worker_has_left_it() -> None:
    office = Office()
    office.fleet.submit(make_request(0))
    for version in (5, 6):
        office.fleet.load_weights(None, version)
        assert office.store.held == {version}
    for connection in office.connections:
        assert [args[1] for name, args in connection.calls if name == "load_weights"] == [4, 5, 6]


def test_a_worker_that_was_removed_leaves_its_groups_to_the_others() -> None:
    office = Office()
    for number in range(4):
        office.fleet.submit(make_request(number))
    assert office.fleet.remove_worker(0) == 0 and office.fleet.num_workers == 1
    office.fleet.step()
    assert office.submitted(1) == [1, 3, 0, 2]
    assert office.messages == ["rollout worker 0 is removed; its 2 groups go to the others"]
    with pytest.raises(ValueError, match=r"last rollout worker"):
        office.fleet.remove_worker()
    assert office.fleet.add_worker() == 2
    with pytest.raises(ValueError, match=r"there is no rollout worker 0; there are \[1, 2\]"):
        office.fleet.remove_worker(0)
    assert office.fleet.remove_worker() == 2


def test_groups_wait_in_a_slot_without_a_worker_and_are_sent_to_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_slot, "BACKOFF", (3600.0,))
    office = Office()
    office.fleet.submit(make_request(0))
    office.connections[0].answer("pump", RuntimeError("struck"))
    office.fleet.step()
    assert len(office.connections) == 2
    office.fleet.submit(make_request(5, n=9))
    assert office.submitted(1) == [5], "a slot in its back-off gets nothing while another has a worker"
    office.connections[1].answer("pump", RuntimeError("struck"))
    office.fleet.step()
    office.fleet.submit(make_request(6))
    assert office.submitted(1) == [5] and office.fleet.num_in_flight == 3
    for slot in office.fleet.slots:
        slot.restart_at = 0.0
    office.fleet.step()
    assert [office.submitted(worker) for worker in (2, 3)] == [[0, 6], [5]]


def test_a_version_that_a_worker_still_reads_is_kept() -> None:
    """The second worker is still being built: it is not waited for, and reads the versions later."""
    office = Office(building=1)
    office.fleet.submit(make_request(0))
    held = []
    for version in (5, 6):
        office.fleet.load_weights(None, version)
        held.append(set(office.store.held))
    for _ in (4, 5, 6):
        office.connections[1].answer("load_weights")
    office.fleet.load_weights(None, 7)
    assert [*held, office.store.held] == [{4, 5}, {4, 5, 6}, {7}]


def fails(connection: HandConnection, error: Exception) -> None:
    """Let a worker answer every evaluation with an error."""
    send = connection.send

    def sends(method: Any, *args: Any) -> Future[Any]:
        if method is not RolloutWorker.generate:
            return send(method, *args)
        answer: Future[Any] = Future()
        answer.set_exception(error)
        return answer

    connection.send = sends


def test_the_share_of_a_worker_that_fails_is_evaluated_by_another() -> None:
    office = Office()
    office.fleet.submit(make_request(0))
    fails(office.connections[0], RuntimeError("struck"))
    requests = [make_request(number) for number in (9, 3, 7)]
    assert office.fleet.generate(requests) == [group_of(request) for request in requests]
    assert len(office.connections) == 3 and "RuntimeError: struck" in office.messages[0]
    assert office.submitted(2) == [0], "its groups in flight are generated again, too"


def test_an_evaluation_that_every_worker_would_refuse_is_an_error() -> None:
    office = Office()
    fails(office.connections[1], ValueError("prompt 'p3' is too long"))
    with pytest.raises(ValueError, match="'p3' is too long"):
        office.fleet.generate([make_request(number) for number in (9, 3, 7)])
    assert len(office.connections) == 2


def test_clear_forgets_finished_groups_too() -> None:
    office = Office(num_workers=1)
    for number in range(2):
        office.fleet.submit(make_request(number))
    office.connections[0].answer("pump", [group_of(make_request(0))])
    assert office.fleet.num_in_flight == 2
    office.fleet.clear()
    assert office.fleet.num_in_flight == 0 and office.fleet.step() == [] and office.fleet.unfinished() == []


def test_new_weights_are_live_when_every_ready_worker_has_them() -> None:
    office = Office()
    office.fleet.submit(make_request(0))
    slow = office.connections[1]
    del slow._at_once["load_weights"]
    loading = threading.Thread(target=office.fleet.load_weights, args=(None, 5))
    loading.start()
    while not slow.num_open("load_weights"):
        time.sleep(0.001)
    loading.join(0.05)
    assert loading.is_alive(), "it waits for the slow one"
    slow.answer("load_weights")
    loading.join(20)
    assert not loading.is_alive() and office.store.held == {5}


def test_the_first_error_of_a_worker_is_the_cause() -> None:
    office = Office(num_workers=1)
    office.fleet.submit(make_request(0))
    for error in ("first", "second"):
        office.connections[0].answer("pump", RuntimeError(error))
    office.fleet.step()
    assert "RuntimeError: first" in office.messages[0]


def test_a_new_group_goes_to_a_slot_that_has_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_slot, "BACKOFF", (1000.0,))
    office = Office()
    for number, n in enumerate((1, 5)):
        office.fleet.submit(make_request(number, n=n))
    office.connections[0].answer("pump", RuntimeError("struck"))
    office.fleet.step()
    office.fleet.submit(make_request(2))
    assert [office.submitted(worker) for worker in (0, 1)] == [[0], [1, 2]]


def test_a_worker_is_overdue_from_its_last_answer_on(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(async_fleet, "time", SimpleNamespace(monotonic=lambda: now[0]))
    office = Office(num_workers=1)
    (slot,) = office.fleet.slots
    seen: list[float] = []
    slot.is_overdue = lambda since, num_timeouts=1.0: bool(seen.append(since))  # pyright: ignore
    office.fleet.submit(make_request(0))
    office.fleet.step()
    now[0] = 150.0
    office.fleet.step()
    office.connections[0].answer("pump", [])
    office.fleet.step()
    assert seen == [100.0, 100.0, 150.0]
