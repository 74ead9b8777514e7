"""One slot of a fleet: what a new worker is sent, how long it is waited for, and when the slot is lost."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from gspo.rollout.workers import worker_slot
from gspo.rollout.workers.connection import FleetClosed, WorkerDied
from gspo.rollout.workers.worker import RolloutWorker
from gspo.rollout.workers.worker_slot import WorkerSlot, WorkerSlotLost
from gspo.types import Group
from tests.rollout.models import make_request
from tests.rollout.workers.hand_connection import HandConnection


class Clock:
    """Stands in for the module `time`; `sleeps` are what was slept."""

    def __init__(self) -> None:
        self.now, self.sleeps = 100.0, []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(worker_slot, "time", SimpleNamespace(monotonic=clock.monotonic, sleep=clock.sleep))
    monkeypatch.setattr(worker_slot, "BACKOFF", (0.0, 1.0, 4.0))
    return clock


class Place:
    """A slot with its connections and messages; a worker answers its n-th step with the n-th of `steps`."""

    def __init__(self, *steps: Any, ready: bool = True, **answers: Callable[..., Any]) -> None:
        self.steps, self.ready, self.answers = list(steps), ready, answers
        self.connections: list[HandConnection] = []
        self.messages: list[str] = []
        self.slot = WorkerSlot(3, self._connect, 5.0, self.messages.append)

    def _connect(self, index: int) -> HandConnection:
        at_once = {"ping": lambda: 1, "submit": lambda requests: None, **self.answers} if self.ready else {}
        connection = HandConnection(index, at_once)
        send = connection.send

        def answering(method: Any, *args: Any) -> Any:
            answer = send(method, *args)
            if method is RolloutWorker.step:
                connection.answer("step", self.steps.pop(0))
            return answer

        connection.send = answering
        self.connections.append(connection)
        return connection


def test_a_new_worker_gets_the_calls_of_the_journal_and_its_answer_counts(clock: Clock) -> None:
    place = Place(["one"], WorkerDied("rollout worker 3: struck"), ["two"], ["three"])
    slot = place.slot
    slot.call(RolloutWorker.submit, ["request"])
    slot.call(RolloutWorker.step)
    assert slot.answer() == ["one"] and slot.answer() is None
    slot.call(RolloutWorker.step)
    assert slot.answer() == ["three"]
    first, second = place.connections
    assert first.names() == ["ping", "submit", "step", "step"] and first.ended == ["kill: it was given up"]
    assert second.calls == [("ping", ()), ("submit", (["request"],)), ("step", ()), ("step", ())]
    assert slot.num_restarts == 1 and slot.failures == ["rollout worker 3: struck"]
    assert place.messages == [
        "rollout worker 3: struck\nit is replaced (attempt 1 of 3) and its 0 groups are generated again"
    ]
    slot.reset_journal((RolloutWorker.rest, ()))
    slot.mark_failed(RuntimeError("again"))
    slot.restart()
    assert place.connections[2].names() == ["ping", "rest"]


def test_a_question_is_asked_again_and_is_no_part_of_the_journal(clock: Clock) -> None:
    place = Place(WorkerDied("struck"), ["two"])
    wait = place.slot.ask(RolloutWorker.step)
    assert wait() == ["two"] and place.slot.journal == []
    assert [c.names() for c in place.connections] == [["ping", "step"], ["ping", "step"]]


@pytest.mark.parametrize("error", [ValueError("too long"), KeyError("name"), FloatingPointError("nan")])
def test_an_error_that_another_worker_would_repeat_is_raised_at_once(clock: Clock, error: Exception) -> None:
    place = Place(error)
    place.slot.call(RolloutWorker.step)
    with pytest.raises(type(error)):
        place.slot.answer()
    assert len(place.connections) == 1 and place.slot.failures == [] and place.messages == []


def test_a_slot_is_lost_after_its_last_attempt_and_names_the_first_and_the_last_cause(clock: Clock) -> None:
    place = Place(*(RuntimeError(f"fault {i}") for i in range(4)))
    place.slot.call(RolloutWorker.step)
    with pytest.raises(WorkerSlotLost) as lost:
        place.slot.answer()
    assert str(lost.value) == (
        "rollout worker 3: RuntimeError: fault 0\n3 workers started in its place ended too, without finishing a group; "
        "the last: rollout worker 3: RuntimeError: fault 3"
    )
    assert clock.sleeps == [0.0, 1.0, 4.0] and len(place.connections) == 4
    assert [message.split("attempt ")[1][:6] for message in place.messages] == ["1 of 3", "2 of 3", "3 of 3"]


def test_a_finished_group_clears_the_failures_and_an_unknown_one_does_not(clock: Clock) -> None:
    slot = Place().slot
    for number in (4, 5):
        slot.assigned[number] = make_request(number, n=3)
    assert slot.num_responses == 6
    slot.failures = ["a"]
    stranger, known = (Group(make_request(i).prompt, (), i, 0) for i in (9, 4))
    assert slot.record_finished([stranger]) == [] and slot.failures == ["a"]
    assert slot.record_finished([stranger, known]) == [known] and slot.failures == []
    assert slot.record_finished([known]) == [] and slot.num_responses == 3
    assert [r.submission for r in slot.take_assigned()] == [5] and slot.assigned == {}


def test_deadlines_count_from_when_the_engine_is_built(clock: Clock) -> None:
    place = Place(ready=False)
    slot = place.slot
    clock.now = 100.0 + worker_slot.START_SECONDS
    assert not slot.is_ready and not slot.is_overdue(100.0)
    clock.now += 0.5
    assert slot.is_overdue(100.0)
    assert "was not built within 600 s" in slot._describe_failure(TimeoutError())
    place.connections[0].answer("ping", 1)
    built = clock.now
    clock.now = built + 5.0
    assert slot.is_ready and not slot.is_overdue(100.0)
    clock.now = built + 5.1
    assert slot.is_overdue(100.0) and not slot.is_overdue(built + 1.0) and not slot.is_overdue(100.0, 10.0)
    assert "gave no answer within 5 s (rollout.worker_timeout)" in slot._describe_failure(TimeoutError())


def test_a_closed_slot_starts_nothing_and_ends_its_worker(clock: Clock) -> None:
    ready, building = Place(), Place(ready=False)
    for place in (ready, building):
        place.slot.assigned[1] = make_request(1)
        place.slot.close()
        assert place.slot.closed and place.slot.assigned == {}
        with pytest.raises(FleetClosed):
            place.slot.mark_failed(RuntimeError("late"))
    assert ready.connections[0].ended == ["close"]
    assert building.connections[0].ended == ["kill: the run ended", "close"]
    place = Place()
    place.slot.mark_failed(RuntimeError("x"))
    place.slot.closed = True
    with pytest.raises(FleetClosed):
        place.slot.restart()
    assert len(place.connections) == 1
