"""A fleet in lockstep gives the same bits whatever happens to its workers."""

from __future__ import annotations

import copy
import functools
import threading
from itertools import chain

import pytest

from gspo.rollout.scripted import ScriptedEngine
from gspo.rollout.workers.lockstep_fleet import LockstepFleet
from gspo.types import Group
from tests.rollout.models import make_engine, make_request
from tests.rollout.workers.faulty_fleet import MODEL, FaultyFleet, finish, native, no_fault, run, script, scripted


@functools.cache
def undisturbed() -> list[list[Group]]:
    return run(FaultyFleet(LockstepFleet, native, no_fault).fleet)


@pytest.mark.parametrize(("worker", "step"), [(0, 1), (1, 2), (0, 3), (1, 4), (0, 7)])
def test_a_worker_that_dies_changes_no_bit(worker, step):
    def fault(life: int, number: int) -> None:
        if life == worker and number == step:
            raise SystemExit("struck by a test")

    world = FaultyFleet(LockstepFleet, native, fault)
    assert run(world.fleet) == undisturbed()
    assert len(world.connections) == 3 and "struck by a test" in world.messages[0]
    assert world.fleet.metrics()["rollout/worker_restarts"].result() == 1


def test_workers_that_die_again_while_catching_up_change_no_bit():
    def fault(life: int, number: int) -> None:
        if (life, number) in {(0, 3), (2, 1), (3, 3), (1, 5)}:
            raise SystemExit("struck by a test")

    world = FaultyFleet(LockstepFleet, native, fault)
    assert run(world.fleet) == undisturbed()
    assert len(world.connections) == 6


def test_a_fleet_gives_the_tokens_of_one_engine():
    roomy = [make_engine(copy.deepcopy(MODEL), num_slots=64, decode_chunk=2) for _ in range(3)]
    fleet, engine = FaultyFleet(LockstepFleet, roomy.pop, no_fault).fleet, roomy[0]
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

    world = FaultyFleet(LockstepFleet, scripted, fault, timeout=0.3)
    assert run(world.fleet) == run(FaultyFleet(LockstepFleet, scripted, no_fault).fleet)
    assert "gave no answer within 0.3 s" in world.messages[0]
    release.set()


def test_a_worker_about_to_be_removed_stays_when_the_others_are_lost():
    def fault(life: int, number: int) -> None:
        if world.connections[life].name == "rollout worker 0":
            if life == 4:  # the last one of its slot: in the same call the removal of the other is asked for
                world.fleet.remove_worker(1)
            raise SystemExit("bad memory")

    world = FaultyFleet(LockstepFleet, scripted, fault)
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

    world = FaultyFleet(LockstepFleet, lambda: Stubborn(script, num_slots=4), no_fault)
    for i in range(4):
        world.fleet.submit(make_request(i))
    world.fleet.step()
    world.fleet.clear()
    assert len(world.connections) == 5
    assert world.fleet.num_in_flight == 0 and world.fleet.num_workers == 1
    world.fleet.submit(make_request(0))
    finish(world, 1)
