"""The calls that a fleet in lockstep makes, one by one: real workers that answer in the caller's thread."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from gspo.rollout.engine import GroupRequest
from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.rollout.workers import worker_slot
from gspo.rollout.workers.connection import FleetClosed, WorkerDied, WorkersLost
from gspo.rollout.workers.lockstep_fleet import LockstepFleet
from gspo.rollout.workers.worker import RolloutWorker
from tests.rollout.models import make_request
from tests.rollout.workers.thread_connection import NoWeights, Version, no_weights


class Direct:
    """A Connection that makes a call when it is sent. `dies_at` names the call, and how many of them, it dies over."""

    def __init__(self, index: int) -> None:
        self.name = f"rollout worker {index}"
        self.calls: list[Any] = []
        self.ended: list[str] = []
        self.dies_at: tuple[str, int] | None = None
        self.worker = RolloutWorker.__new__(RolloutWorker)
        self.worker.engine = ScriptedEngine(lambda prompt, submission, index: ScriptedAnswer((5,) * 6))
        self.worker._requests = {}

    @property
    def alive(self) -> bool:
        return not self.ended

    def send(self, method: Callable[..., Any], *args: Any) -> Future[Any]:
        answer: Future[Any] = Future()
        self.calls.append((method.__name__, *args))
        if self.dies_at == (method.__name__, sum(call[0] == method.__name__ for call in self.calls)):
            self.ended.append("died")
        if self.ended:
            answer.set_exception(WorkerDied(f"{self.name}: out of luck"))
        else:
            answer.set_result(getattr(self.worker, method.__name__)(*args))
        return answer

    def submitted(self) -> list[list[int]]:
        return [[request.submission for request in call[1]] for call in self.calls if call[0] == "submit"]

    def names(self) -> list[str]:
        return [call[0] for call in self.calls]

    def stacks(self) -> str:
        return "busy" if self.name.endswith("1") else ""

    def kill(self, reason: str = "it was killed") -> None:
        self.ended.append(reason)

    def close(self) -> None:
        self.ended.append("closed")


class World:
    """A fleet, and every connection that it made."""

    def __init__(self, num_workers: int = 2) -> None:
        self.made: list[Direct] = []
        self.store, self.messages = NoWeights(), []
        self.fleet = LockstepFleet(
            self._connect, num_workers, weights=no_weights, store=self.store, version=4, notify=self.messages.append
        )

    def _connect(self, index: int) -> Direct:
        self.made.append(Direct(index))
        return self.made[-1]

    def submit(self, *numbers: int, n: int = 1) -> None:
        for number in numbers:
            self.fleet.submit(make_request(number, n=n, max_tokens=9))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_slot, "BACKOFF", (0.0, 0.0))


def begun(requests: list[GroupRequest]) -> dict[int, int]:
    return {r.submission: len(r.partial[0].token_ids) if r.partial else 0 for r in requests}


def test_the_first_weights_are_published_before_anything_else_and_once() -> None:
    world = World()
    assert world.store.published == []
    world.submit(0)
    for connection in world.made:
        assert connection.calls[:2] == [("ping",), ("load_weights", Version(4), 4)]
    world.fleet.step()
    assert world.store.published == [4] and world.fleet.num_workers == 2
    with pytest.raises(ValueError, match="num_workers=0: expected at least 1"):
        World(num_workers=0)


def test_groups_go_to_the_fewest_responses_and_only_workers_with_groups_step() -> None:
    world = World(num_workers=3)
    world.submit(0, n=3)
    world.submit(1, 2, 3)
    assert [x.submitted() for x in world.made] == [[[0]], [[1], [3]], [[2]]]
    world = World(num_workers=2)
    world.submit(7)
    for _ in range(5):
        assert world.fleet.step() == []
    assert world.fleet.num_in_flight == 1 and [g.submission for g in world.fleet.step()] == [7]
    assert world.fleet.num_in_flight == 0 and world.fleet.step() == []
    assert [x.names().count("step") for x in world.made] == [6, 0]


def test_groups_that_end_together_come_in_order_of_submission() -> None:
    world = World()
    world.submit(5, 3, 4)
    assert [g.submission for _ in range(6) for g in world.fleet.step()] == [3, 4, 5]


def test_new_weights_assign_everything_again_with_what_was_begun() -> None:
    world = World()
    world.submit(6, 2, 4)
    world.fleet.step()
    world.fleet.load_weights(None, 5)
    a, b = world.made
    assert a.calls[-3:-1] == [("load_weights", Version(5), 5), ("take_back",)] == b.calls[-3:-1]
    assert [begun(a.calls[-1][1]), begun(b.calls[-1][1])] == [{2: 1, 6: 1}, {4: 1}], "in order of submission"
    assert world.store.published == [4, 5] and world.store.held == {5}
    groups = [g for _ in range(5) for g in world.fleet.step()]
    assert [(g.submission, g.rollouts[0].versions) for g in groups] == [(n, (4, 5, 5, 5, 5, 5)) for n in (2, 4, 6)]


def test_a_new_worker_repeats_the_calls_since_the_last_weights() -> None:
    world = World()
    world.submit(0, 1)
    world.fleet.step()
    world.fleet.load_weights({}, 5)
    world.submit(2)
    first = world.made[0]
    first.dies_at = "step", 3
    groups = [g for _ in range(6) for g in world.fleet.step()]
    assert [(g.submission, g.rollouts[0].versions[0]) for g in groups] == [(0, 4), (1, 4), (2, 5)]
    new = world.made[2]
    assert new.names()[:4] == ["ping", "load_weights", "submit", "submit"] and new.calls[1][2] == 5
    assert new.names()[4:6] == ["step", "step"] and new.submitted() == [[0], [2]]
    metrics = {name: metric.result() for name, metric in world.fleet.metrics().items()}
    assert metrics == {"rollout/num_workers": 2, "rollout/worker_restarts": 1, "rollout/workers_lost": 0}
    assert world.messages == [
        "rollout worker 0: out of luck\nit is replaced (attempt 1 of 2) and its 2 groups are generated again"
    ]
    world.fleet.remove_worker(0)
    world.fleet.step()
    metrics = {name: metric.result() for name, metric in world.fleet.metrics().items()}
    assert metrics == {"rollout/num_workers": 1, "rollout/worker_restarts": 1, "rollout/workers_lost": 0}


def test_after_clear_a_new_worker_gets_the_live_weights_alone() -> None:
    world = World()
    world.submit(0, 1, 2)
    world.fleet.step()
    world.fleet.clear()
    assert world.fleet.num_in_flight == 0 and world.fleet.unfinished() == [] and world.fleet.step() == []
    assert [x.worker.engine.num_in_flight for x in world.made] == [0, 0]
    world.submit(3)
    world.made[0].dies_at = "step", 2
    assert [g.submission for _ in range(6) for g in world.fleet.step()] == [3]
    assert world.made[2].names()[:4] == ["ping", "load_weights", "submit", "step"]
    World().fleet.clear()


def test_a_worker_that_joins_gets_the_live_weights_and_the_next_group() -> None:
    world = World(num_workers=1)
    world.submit(0)
    world.fleet.load_weights(None, 6)
    assert world.fleet.add_worker() == 1 and world.fleet.num_workers == 2
    assert world.made[1].names() == ["ping"] and "is added" in world.messages[-1]
    world.submit(1)
    assert world.made[1].calls[1:] == [
        ("load_weights", Version(6), 6),
        ("submit", [make_request(1, n=1, max_tokens=9)]),
    ]
    assert [slot.index for slot in world.fleet.slots] == [0, 1]
    assert world.fleet.add_worker() == 2
    world.fleet.load_weights(None, 7)
    assert world.made[2].calls[1] == ("load_weights", Version(7), 7), "not the version before"


def test_a_worker_that_is_removed_gives_its_groups_to_the_others_with_what_it_has_begun() -> None:
    world = World(num_workers=3)
    world.submit(0, 1, 2)
    world.fleet.step()
    assert world.fleet.remove_worker() == 2 and world.fleet.num_workers == 2
    assert world.fleet.remove_worker(0) == 0 and world.fleet.num_workers == 1
    for number in (None, 1):
        with pytest.raises(ValueError, match="the last rollout worker cannot be removed"):
            world.fleet.remove_worker(number)
    world.submit(3)
    a, b, c = world.made
    assert b.submitted() == [[1], [0, 2], [3]] and begun(b.calls[-2][1]) == {0: 1, 2: 1}
    assert world.messages == [f"rollout worker {n} is removed; its 1 groups go to the others" for n in (0, 2)]
    assert [g.submission for _ in range(6) for g in world.fleet.step()] == [0, 1, 2, 3]
    world.fleet.close()
    assert "closed" in a.ended and "closed" in c.ended and "closed" in b.ended and world.store.held == set()
    for call in (world.fleet.add_worker, world.fleet.step):
        with pytest.raises(FleetClosed):
            call()


def test_which_workers_can_be_removed() -> None:
    world = World(num_workers=2)
    world.submit(7)
    with pytest.raises(ValueError, match=r"there is no rollout worker 7; there are \[0, 1\]"):
        world.fleet.remove_worker(7)
    world.fleet.remove_worker(1)
    world.fleet.add_worker()
    with pytest.raises(ValueError, match=r"there is no rollout worker 1; there are \[0, 2\]"):
        world.fleet.remove_worker(1)
    assert world.fleet.remove_worker() == 2, "one that has not joined yet, too"
    world.submit(0)
    assert [slot.index for slot in world.fleet.slots] == [0] and world.made[2].names() == ["ping", "take_back"]


def test_weights_that_come_with_a_removal_take_its_groups_back_too() -> None:
    world = World()
    world.submit(0, 1)
    world.fleet.step()
    world.fleet.remove_worker(1)
    world.fleet.load_weights(None, 5)
    assert begun(world.made[0].calls[-1][1]) == {0: 1, 1: 1} and world.fleet.num_workers == 1
    assert [g.submission for _ in range(5) for g in world.fleet.step()] == [0, 1]


def test_a_slot_that_is_lost_leaves_its_groups_as_they_were_at_the_last_weights() -> None:
    world = World()
    world.submit(0, 1)
    world.fleet.step()
    connect = world.fleet._connect

    def broken(index: int) -> Any:
        connection = connect(index)
        connection.dies_at = "step", 1
        return connection

    for slot in world.fleet.slots:
        slot._connect = broken
    world.made[0].dies_at = "step", 2
    world.fleet.step()
    assert [slot.index for slot in world.fleet.slots] == [1] and world.fleet.num_in_flight == 2
    assert begun(world.fleet.unfinished()) == {0: 0, 1: 2}
    groups = [g for _ in range(8) for g in world.fleet.step()]
    assert sorted(g.submission for g in groups) == [0, 1]
    metrics = {name: metric.result() for name, metric in world.fleet.metrics().items()}
    assert metrics == {"rollout/num_workers": 1, "rollout/worker_restarts": 2, "rollout/workers_lost": 1}
    world.made[1].dies_at = "step", world.made[1].names().count("step") + 1
    world.submit(2)
    with pytest.raises(WorkersLost, match=r"^rollout worker 1: out of luck\n.*\nno rollout worker is left$"):
        world.fleet.step()
    with pytest.raises(WorkersLost, match="out of luck"):
        world.submit(3)


def test_a_worker_that_is_lost_over_its_removal_counts_its_restarts_once() -> None:
    world = World()
    world.submit(0, 1)
    world.made[0].dies_at = "step", 1
    world.fleet.step()
    slot, connect = world.fleet.slots[0], world.fleet._connect

    def broken(index: int) -> Any:
        connection = connect(index)
        connection.dies_at = "take_back", 1
        return connection

    slot._connect = broken
    world.made[2].dies_at = "take_back", 1
    world.fleet.remove_worker(0)
    world.fleet.load_weights(None, 5)
    metrics = {name: metric.result() for name, metric in world.fleet.metrics().items()}
    assert metrics == {"rollout/num_workers": 1, "rollout/worker_restarts": 2, "rollout/workers_lost": 1}
    assert len(world.made) == 2 + 2 and world.fleet.num_in_flight == 2


def test_an_evaluation_is_shared_and_comes_back_in_its_order_whoever_dies() -> None:
    world = World(num_workers=3)
    world.submit(0)
    world.fleet.step()
    asked = [make_request(number, n=1, max_tokens=2) for number in (9, 3, 7, 5)]
    world.made[1].dies_at = "generate", 1
    assert [g.submission for g in world.fleet.generate(asked)] == [9, 3, 7, 5]
    shares = [[r.submission for call in x.calls if call[0] == "generate" for r in call[1]] for x in world.made]
    assert shares == [[9, 5], [3], [7], [3]]
    assert world.made[3].names() == ["ping", "load_weights", "generate"]
    assert world.fleet.generate([]) == [] and [g.submission for _ in range(5) for g in world.fleet.step()] == [0]


def test_every_worker_rests_and_says_what_it_does() -> None:
    world = World()
    world.submit(0)
    world.fleet.rest()
    assert [x.names()[-1] for x in world.made] == ["rest", "rest"]
    assert world.fleet.stacks() == "rollout worker 0:\ngave no answer\nrollout worker 1:\nbusy"
    world.fleet.add_worker()
    world.fleet.kill()
    assert [x.ended for x in world.made] == [["the run ended"]] * 3


def test_a_worker_that_has_not_joined_is_closed_with_the_others() -> None:
    world = World()
    world.submit(0)
    world.fleet.add_worker()
    world.fleet.close()
    world.fleet.close()
    assert all("closed" in connection.ended for connection in world.made) and len(world.made) == 3
