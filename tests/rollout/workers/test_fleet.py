"""Fleets under faults: workers in threads that die, hang and fail where the test says."""

from __future__ import annotations

import copy
import functools
import threading
import time
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest

from gspo.rollout.engine import EngineError, RolloutEngine
from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.rollout.workers import worker_slot
from gspo.rollout.workers.async_fleet import AsyncFleet
from gspo.rollout.workers.connection import FleetClosed, WorkersLost
from gspo.rollout.workers.lockstep_fleet import LockstepFleet
from gspo.types import Group, Prompt
from tests.rollout.models import drain, make_engine, make_model, make_request
from tests.rollout.workers.processes import wait_until
from tests.rollout.workers.thread_connection import NoWeights, ThreadConnection, no_weights

_MODEL = make_model()
# (which worker, counted from the first; its engine's step) → raises, or not
Fault = Callable[[int, int], None]


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch):
    monkeypatch.setattr(worker_slot, "BACKOFF", (0.0, 0.0, 0.0))


class Faulty:
    """An engine with a fault before some of its steps."""

    def __init__(self, engine: RolloutEngine, life: int, fault: Fault) -> None:
        self._engine, self._life, self._fault = engine, life, fault
        self._num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Group]:
        self._num_steps += 1
        self._fault(self._life, self._num_steps)
        return self._engine.step()


class World:
    """A fleet of `num_workers` faulty workers, with its messages and what it published."""

    def __init__(
        self,
        kind: type[LockstepFleet] | type[AsyncFleet],
        make: Callable[[], RolloutEngine],
        fault: Fault,
        **options: Any,
    ) -> None:
        self.said: list[str] = []
        self.store = NoWeights()
        self.connections: list[ThreadConnection] = []
        self._make, self._fault = make, fault
        self.fleet: Any = kind(
            self._connect,
            options.pop("num_workers", 2),
            weights=no_weights,
            store=self.store,
            notify=self.said.append,
            **options,
        )

    def _connect(self, index: int) -> ThreadConnection:
        life = len(self.connections)
        connection = ThreadConnection(lambda: Faulty(self._make(), life, self._fault), index)  # pyright: ignore
        self.connections.append(connection)
        return connection


def _script(prompt: Prompt, submission: int, index: int) -> ScriptedAnswer:
    return ScriptedAnswer(tuple(range(5, 7 + (submission * 5 + index * 3) % 9)), text=f"{prompt.uid}/{index}")


def scripted() -> ScriptedEngine:
    return ScriptedEngine(_script, num_slots=4)


def native() -> RolloutEngine:
    return make_engine(copy.deepcopy(_MODEL), num_slots=4, decode_chunk=2)


def fine(life: int, step: int) -> None: ...


def run(fleet: Any) -> list[list[Group]]:
    """Three versions of a fleet's life: what every step handed out."""
    steps: list[list[Group]] = []
    for version in range(3):
        for i in range(4):
            fleet.submit(make_request(version * 4 + i, n=1 + i % 3, version=version))
        steps += [fleet.step(), fleet.step()]
        fleet.load_weights(None, version + 1)
    while fleet.num_in_flight:
        steps.append(fleet.step())
    return steps


def finish(world: World, count: int) -> dict[int, Group]:
    """Step until all came out; each once."""
    groups = drain(world.fleet, limit=5000)
    assert sorted(g.submission for g in groups) == list(range(count))
    return {g.submission: g for g in groups}


@functools.cache
def undisturbed() -> list[list[Group]]:
    return run(World(LockstepFleet, native, fine).fleet)


@pytest.mark.parametrize(("worker", "step"), [(0, 1), (1, 2), (0, 3), (1, 4), (0, 7)])
def test_a_worker_that_dies_changes_no_bit(worker, step):
    def fault(life: int, number: int) -> None:
        if life == worker and number == step:
            raise SystemExit("struck by a test")

    world = World(LockstepFleet, native, fault)
    assert run(world.fleet) == undisturbed()
    assert len(world.connections) == 3 and "struck by a test" in world.said[0]
    assert world.fleet.metrics()["rollout/worker_restarts"].result() == 1


def test_workers_that_die_again_while_catching_up_change_no_bit():
    def fault(life: int, number: int) -> None:
        if (life, number) in {(0, 3), (2, 1), (3, 3), (1, 5)}:
            raise SystemExit("struck by a test")

    world = World(LockstepFleet, native, fault)
    assert run(world.fleet) == undisturbed()
    assert len(world.connections) == 6


def test_a_fleet_gives_the_tokens_of_one_engine():
    roomy = [make_engine(copy.deepcopy(_MODEL), num_slots=64, decode_chunk=2) for _ in range(3)]
    fleet, engine = World(LockstepFleet, roomy.pop, fine).fleet, roomy[0]
    ours, theirs = (sorted(chain.from_iterable(run(e)), key=lambda g: g.submission) for e in (fleet, engine))
    for a, b in zip(ours, theirs, strict=True):
        assert a.submission == b.submission and a.version == b.version
        for x, y in zip(a.rollouts, b.rollouts, strict=True):
            assert (x.token_ids, x.versions, x.text) == (y.token_ids, y.versions, y.text)
            assert x.log_probs == pytest.approx(y.log_probs, abs=1e-5)


def test_a_hung_worker_is_replaced():
    release = threading.Event()

    def fault(life: int, number: int) -> None:
        if life == 0 and number == 2:
            release.wait()

    world = World(LockstepFleet, scripted, fault, timeout=0.3)
    assert run(world.fleet) == run(World(LockstepFleet, scripted, fine).fleet)
    assert "gave no answer within 0.3 s" in world.said[0]
    release.set()


def test_a_hung_worker_of_an_asynchronous_fleet_is_replaced():
    release = threading.Event()

    def fault(life: int, number: int) -> None:
        if life == 0 and number == 2:
            release.wait()

    world = World(AsyncFleet, scripted, fault, timeout=0.3)
    for i in range(6):
        world.fleet.submit(make_request(i))
    finish(world, 6)
    assert "gave no answer within 0.3 s" in world.said[0]
    release.set()


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_an_engine_that_fails_is_replaced_and_the_cause_reported(kind):
    def fault(life: int, number: int) -> None:
        if life == 1 and number == 2:
            raise RuntimeError("CUDA error: out of luck")

    world = World(kind, scripted, fault)
    for i in range(6):
        world.fleet.submit(make_request(i))
    finish(world, 6)
    assert "RuntimeError: CUDA error: out of luck" in world.said[0]


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_a_slot_whose_workers_keep_dying_is_given_up_and_the_others_go_on(kind):
    world: World

    def fault(life: int, number: int) -> None:
        if world.connections[life].name == "rollout worker 0":
            raise SystemExit("bad memory")

    world = World(kind, scripted, fault)
    for i in range(6):
        world.fleet.submit(make_request(i))
    finish(world, 6)
    assert world.fleet.num_workers == 1 and world.fleet.metrics()["rollout/workers_lost"].result() == 1
    assert len(world.connections) == 5 and "given up" in world.said[-1]


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_when_every_worker_keeps_dying_the_root_cause_comes_first(kind):
    def fault(life: int, number: int) -> None:
        raise SystemExit(f"death {life}")

    world = World(kind, scripted, fault)
    with pytest.raises(WorkersLost, match=r"^rollout worker \d: death \d") as lost:
        for i in range(4):
            world.fleet.submit(make_request(i))
        drain(world.fleet, limit=5000)
    assert "no rollout worker is left" in str(lost.value)
    assert len(world.connections) == 8
    with pytest.raises(WorkersLost, match="death"):
        world.fleet.step()


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_an_error_of_the_request_or_the_numbers_is_raised_as_itself(kind):
    def fault(life: int, number: int) -> None:
        if number == 2:
            raise FloatingPointError("log-probs that are not finite")

    world = World(kind, scripted, fault)
    world.fleet.submit(make_request(0))
    with pytest.raises(FloatingPointError, match="not finite"):
        drain(world.fleet, limit=5000)
    assert len(world.connections) == 2


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_an_engine_that_refuses_its_weights_ends_the_run_with_the_cause(kind):
    def refuse() -> RolloutEngine:
        engine = scripted()
        engine.load_weights = lambda weights, version: (_ for _ in ()).throw(EngineError("too long"))  # pyright: ignore
        return engine

    fleet: Any = kind(lambda i: ThreadConnection(refuse, i), 1, weights=no_weights, store=NoWeights())
    with pytest.raises(EngineError, match="too long"):
        fleet.submit(make_request(0))
        drain(fleet, limit=5000)


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_workers_join_and_leave_during_a_run_and_no_group_is_lost(kind):
    world = World(kind, scripted, fine, num_workers=1)
    fleet, groups = world.fleet, []
    for number in range(40):
        for i in range(4):
            fleet.submit(make_request(4 * number + i))
        if number == 5:
            assert fleet.add_worker() == 1
        if number == 10:
            assert fleet.add_worker() == 2
        if number == 20:
            assert fleet.remove_worker(0) == 0
        if number == 30:
            assert fleet.remove_worker() == 2
        groups += fleet.step()
    groups += drain(fleet, limit=5000)
    assert sorted(g.submission for g in groups) == list(range(160))
    assert fleet.num_workers == 1
    assert all("submit" in c.log for c in world.connections), "every worker took part"
    with pytest.raises(ValueError, match="last rollout worker"):
        fleet.remove_worker()
    ended = [False, True, False]
    assert wait_until(lambda: [c.alive for c in world.connections] == ended), (
        "removed workers end by themselves"
    )


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_groups_of_the_last_worker_wait_for_one_that_joins(kind):
    world: World

    def fault(life: int, number: int) -> None:
        if life == 3:  # the last one of its slot: another worker joins while it dies
            world.fleet.add_worker()
        if world.connections[life].name == "rollout worker 0":
            raise SystemExit("bad memory")

    world = World(kind, scripted, fault, num_workers=1)
    for i in range(3):
        world.fleet.submit(make_request(i))
    finish(world, 3)
    assert world.fleet.num_workers == 1 and "submit" in world.connections[4].log


def test_a_worker_about_to_be_removed_stays_when_the_others_are_lost():
    def fault(life: int, number: int) -> None:
        if world.connections[life].name == "rollout worker 0":
            if life == 4:  # the last one of its slot: in the same call the removal of the other is asked for
                world.fleet.remove_worker(1)
            raise SystemExit("bad memory")

    world = World(LockstepFleet, scripted, fault)
    for i in range(4):
        world.fleet.submit(make_request(i))
    finish(world, 4)
    assert len(world.connections) == 5
    assert [slot.index for slot in world.fleet.slots] == [1] and world.fleet.num_workers == 1


def test_a_slot_lost_over_clear_takes_nothing_with_it():
    class Stubborn(ScriptedEngine):
        """Dies over `clear` in the first slot."""

        def clear(self) -> None:
            if threading.current_thread() is not world.connections[1].thread:
                raise SystemExit("bad memory")
            super().clear()

    world = World(LockstepFleet, lambda: Stubborn(_script, num_slots=4), fine)
    for i in range(4):
        world.fleet.submit(make_request(i))
    world.fleet.step()
    world.fleet.clear()
    assert len(world.connections) == 5
    assert world.fleet.num_in_flight == 0 and world.fleet.num_workers == 1
    world.fleet.submit(make_request(0))
    finish(world, 1)


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_no_worker_is_started_in_a_fleet_that_is_closed(kind):
    def fault(life: int, number: int) -> None:
        if life == 0:
            raise SystemExit("struck by a test")

    class Closing(World):
        """The fleet is closed, as by another thread, while a replacement is started."""

        def _connect(self, index: int) -> ThreadConnection:
            if len(self.connections) == 2:
                self.fleet.close()
            return super()._connect(index)

    world = Closing(kind, scripted, fault)
    with pytest.raises(FleetClosed):
        for i in range(4):
            world.fleet.submit(make_request(i))
        drain(world.fleet, limit=5000)
    with pytest.raises(FleetClosed):
        world.fleet.add_worker()
    assert [c.alive for c in world.connections] == [False, False, False]


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_evaluation_is_complete_and_in_order_though_workers_die_over_it(kind):
    class Fragile(ScriptedEngine):
        lives = 0

        def generate(self, requests):
            Fragile.lives += 1
            if Fragile.lives in (1, 3):
                raise SystemExit("struck by a test")
            return super().generate(requests)

    world = World(kind, lambda: Fragile(_script), fine)
    requests = [make_request(i) for i in (7, 3, 5, 1, 2)]
    assert world.fleet.generate(requests) == scripted().generate(requests)
    assert len(world.connections) == 4


def test_asynchronous_responses_go_on_across_new_weights_and_carry_their_versions():
    class Slow(ScriptedEngine):
        def step(self):
            time.sleep(0.005)
            return super().step()

    def long(prompt: Prompt, submission: int, index: int) -> ScriptedAnswer:
        return ScriptedAnswer(tuple(range(12 + submission % 3)))

    world = World(AsyncFleet, lambda: Slow(long), fine)
    fleet, groups = world.fleet, []
    for version in range(4):
        for i in range(4):
            fleet.submit(make_request(version * 4 + i, version=version, max_tokens=64))
        time.sleep(0.03)
        groups += fleet.step()
        fleet.load_weights(None, version + 1)
        assert world.store.held == {version + 1}, "a version is freed once no worker needs it"
    groups += drain(fleet, limit=5000)
    assert sorted(g.submission for g in groups) == list(range(16))
    versions = [r.versions for g in groups for r in g.rollouts]
    assert all(list(v) == sorted(v) for v in versions)
    assert all(v >= g.version for g in groups for r in g.rollouts for v in r.versions)
    assert any(len(set(v)) > 1 for v in versions), "no response crossed a weight update"


def test_asynchronous_groups_come_out_once_each_though_workers_die():
    def fault(life: int, number: int) -> None:
        if life < 12 and number == 8 + life % 5:  # 12 tokens, 2 per step: after a group or more has finished
            raise SystemExit("struck by a test")

    world = World(AsyncFleet, native, fault)
    fleet, groups = world.fleet, []
    for number in range(30):
        fleet.submit(make_request(number))
        groups += fleet.step()
        if number % 10 == 9:
            fleet.load_weights(None, number)
    groups += drain(fleet, limit=5000)
    assert sorted(g.submission for g in groups) == list(range(30))
    assert len(world.connections) >= 6


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_unfinished_groups_continue_in_another_fleet(kind):
    world = World(kind, scripted, fine)
    for i in range(9):
        world.fleet.submit(make_request(i))
    handed_out = world.fleet.step() + world.fleet.step()
    state = world.fleet.unfinished()
    assert sorted([g.submission for g in handed_out] + [r.submission for r in state]) == list(range(9))
    world.fleet.close()
    other = World(kind, scripted, fine, num_workers=3)
    for request in state:
        other.fleet.submit(request)
    groups = handed_out + drain(other.fleet, limit=5000)
    expected = scripted().generate([make_request(i) for i in range(9)])
    assert [
        (g.submission, [r.token_ids for r in g.rollouts]) for g in sorted(groups, key=lambda g: g.submission)
    ] == [(g.submission, [r.token_ids for r in g.rollouts]) for g in expected]


def test_a_worker_that_does_not_give_its_groups_back_is_replaced():
    hang = threading.Event()

    class Stubborn(ScriptedEngine):
        """Does not stop for `clear`, in the first two workers."""

        def clear(self) -> None:
            if len(world.connections) == 2:
                hang.wait(60)
            super().clear()

    world = World(AsyncFleet, lambda: Stubborn(_script, num_slots=4), fine, timeout=0.5)
    for i in range(4):
        world.fleet.submit(make_request(i))
    clearing = threading.Thread(target=world.fleet.clear, daemon=True)
    clearing.start()
    clearing.join(30)
    hang.set()
    assert not clearing.is_alive(), "clear() waits for a worker that does not answer"
    assert any("rollout worker 0: gave no answer within 0.5 s" in said for said in world.said)
    assert world.fleet.num_in_flight == 0
    world.fleet.submit(make_request(9))
    assert [g.submission for g in drain(world.fleet, limit=5000)] == [9]
    world.fleet.close()
