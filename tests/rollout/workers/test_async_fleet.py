"""An asynchronous fleet: responses across weight updates, and workers that die or hang."""

from __future__ import annotations

import threading
import time

from gspo.rollout.scripted import ScriptedAnswer, ScriptedEngine
from gspo.rollout.workers.async_fleet import AsyncFleet
from gspo.types import Prompt
from tests.rollout.models import drain, make_request
from tests.rollout.workers.faulty_fleet import FaultyFleet, finish, native, no_fault, script, scripted


def test_a_hung_worker_of_an_asynchronous_fleet_is_replaced():
    release = threading.Event()

    def fault(life: int, number: int) -> None:
        if life == 0 and number == 2:
            release.wait()

    world = FaultyFleet(AsyncFleet, scripted, fault, timeout=0.3)
    for i in range(6):
        world.fleet.submit(make_request(i))
    finish(world, 6)
    assert "gave no answer within 0.3 s" in world.messages[0]
    release.set()


def test_asynchronous_responses_go_on_across_new_weights_and_carry_their_versions():
    class Slow(ScriptedEngine):
        def step(self):
            time.sleep(0.005)
            return super().step()

    def long(prompt: Prompt, submission: int, index: int) -> ScriptedAnswer:
        return ScriptedAnswer(tuple(range(12 + submission % 3)))

    world = FaultyFleet(AsyncFleet, lambda: Slow(long), no_fault)
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

    world = FaultyFleet(AsyncFleet, native, fault)
    fleet, groups = world.fleet, []
    for number in range(30):
        fleet.submit(make_request(number))
        groups += fleet.step()
        if number % 10 == 9:
            fleet.load_weights(None, number)
    groups += drain(fleet, limit=5000)
    assert sorted(g.submission for g in groups) == list(range(30))
    assert len(world.connections) >= 6


def test_a_worker_that_does_not_give_its_groups_back_is_replaced():
    hang = threading.Event()

    class Stubborn(ScriptedEngine):
        """Does not stop for `clear`, in the first two workers."""

        def clear(self) -> None:
            if len(world.connections) == 2:
                hang.wait(60)
            super().clear()

    world = FaultyFleet(AsyncFleet, lambda: Stubborn(script, num_slots=4), no_fault, timeout=0.5)
    for i in range(4):
        world.fleet.submit(make_request(i))
    clearing = threading.Thread(target=world.fleet.clear, daemon=True)
    clearing.start()
    clearing.join(30)
    hang.set()
    assert not clearing.is_alive(), "clear() waits for a worker that does not answer"
    assert any("rollout worker 0: gave no answer within 0.5 s" in message for message in world.messages)
    assert world.fleet.num_in_flight == 0
    world.fleet.submit(make_request(9))
    assert [g.submission for g in drain(world.fleet, limit=5000)] == [9]
    world.fleet.close()
