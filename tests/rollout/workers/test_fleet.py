"""What both fleets do when workers die, fail, join and leave."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.rollout.engine import EngineError, RolloutEngine
from gspo.rollout.scripted import ScriptedEngine
from gspo.rollout.workers.async_fleet import AsyncFleet
from gspo.rollout.workers.connection import FleetClosed, WorkersLost
from gspo.rollout.workers.lockstep_fleet import LockstepFleet
from tests.rollout.models import drain, make_request
from tests.rollout.workers.faulty_fleet import FaultyFleet, finish, no_fault, script, scripted
from tests.rollout.workers.processes import wait_until
from tests.rollout.workers.thread_connection import NoWeights, ThreadConnection, no_weights


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_an_engine_that_fails_is_replaced_and_the_cause_reported(kind):
    def fault(life: int, number: int) -> None:
        if life == 1 and number == 2:
            raise RuntimeError("CUDA error: out of luck")

    world = FaultyFleet(kind, scripted, fault)
    for i in range(6):
        world.fleet.submit(make_request(i))
    finish(world, 6)
    assert "RuntimeError: CUDA error: out of luck" in world.messages[0]


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_a_slot_whose_workers_keep_dying_is_given_up_and_the_others_go_on(kind):
    world: FaultyFleet

    def fault(life: int, number: int) -> None:
        if world.connections[life].name == "rollout worker 0":
            raise SystemExit("bad memory")

    world = FaultyFleet(kind, scripted, fault)
    for i in range(6):
        world.fleet.submit(make_request(i))
    finish(world, 6)
    assert world.fleet.num_workers == 1 and world.fleet.metrics()["rollout/workers_lost"].result() == 1
    assert len(world.connections) == 5 and "given up" in world.messages[-1]


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_when_every_worker_keeps_dying_the_root_cause_comes_first(kind):
    def fault(life: int, number: int) -> None:
        raise SystemExit(f"death {life}")

    world = FaultyFleet(kind, scripted, fault)
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

    world = FaultyFleet(kind, scripted, fault)
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
    world = FaultyFleet(kind, scripted, no_fault, num_workers=1)
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
    assert wait_until(lambda: [c.alive for c in world.connections] == ended), "removed workers end by themselves"


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_groups_of_the_last_worker_wait_for_one_that_joins(kind):
    world: FaultyFleet

    def fault(life: int, number: int) -> None:
        if life == 3:  # the last one of its slot: another worker joins while it dies
            world.fleet.add_worker()
        if world.connections[life].name == "rollout worker 0":
            raise SystemExit("bad memory")

    world = FaultyFleet(kind, scripted, fault, num_workers=1)
    for i in range(3):
        world.fleet.submit(make_request(i))
    finish(world, 3)
    assert world.fleet.num_workers == 1 and "submit" in world.connections[4].log


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_no_worker_is_started_in_a_fleet_that_is_closed(kind):
    def fault(life: int, number: int) -> None:
        if life == 0:
            raise SystemExit("struck by a test")

    class Closing(FaultyFleet):
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

    world = FaultyFleet(kind, lambda: Fragile(script), no_fault)
    requests = [make_request(i) for i in (7, 3, 5, 1, 2)]
    assert world.fleet.generate(requests) == scripted().generate(requests)
    assert len(world.connections) == 4


@pytest.mark.parametrize("kind", [LockstepFleet, AsyncFleet])
def test_unfinished_groups_continue_in_another_fleet(kind):
    world = FaultyFleet(kind, scripted, no_fault)
    for i in range(9):
        world.fleet.submit(make_request(i))
    handed_out = world.fleet.step() + world.fleet.step()
    state = world.fleet.unfinished()
    assert sorted([g.submission for g in handed_out] + [r.submission for r in state]) == list(range(9))
    world.fleet.close()
    other = FaultyFleet(kind, scripted, no_fault, num_workers=3)
    for request in state:
        other.fleet.submit(request)
    groups = handed_out + drain(other.fleet, limit=5000)
    expected = scripted().generate([make_request(i) for i in range(9)])
    assert [(g.submission, [r.token_ids for r in g.rollouts]) for g in sorted(groups, key=lambda g: g.submission)] == [
        (g.submission, [r.token_ids for r in g.rollouts]) for g in expected
    ]
