"""Every hostile program, at every level: no reward, nothing touched, nothing left, the next program right."""

from __future__ import annotations

import pytest

from gspo.rewards import grade_code
from gspo.sandbox import Sandbox
from tests.faults import sandbox_rows
from tests.faults.programs.attack import World, make_world
from tests.faults.programs.hostile import ATTACKS, cases_for
from tests.faults.programs.naive import run_naively

# The deadline ends these programs, after one second each: only the default level runs them every time.
LONG = {"spin", "sleep_stop"}


def test_there_are_forty_one_named_attacks():
    kinds = [attack.kind for attack in ATTACKS.values()]
    assert (kinds.count("verdict"), kinds.count("host"), kinds.count("resources")) == (17, 14, 10)


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_gains_nothing(leveled: Sandbox, world: World, name: str, monkeypatch: pytest.MonkeyPatch):
    if name in LONG and leveled.level != 2:
        pytest.skip("met at level 2; every level is in the scorecard")
    monkeypatch.setattr(sandbox_rows, "DEADLINE", 1.0)
    assert sandbox_rows.attack_fault(leveled, ATTACKS[name], world) == ""


def test_the_attack_on_the_tester_speaks_its_wire(leveled: Sandbox):
    """On a fair test it passes: the attack is refused for its content, not because its messages are malformed."""
    reward = grade_code(ATTACKS["tester_scope"].source, {"assert_case": ["assert answer(1) == 0"]}, sandbox=leveled)
    assert reward.score == 1.0


def test_attacks_on_the_verdict_succeed_where_nothing_isolates():
    with make_world() as world:
        succeeded = []
        for attack in ATTACKS.values():
            if attack.kind != "verdict":
                continue
            world.reset()
            outcome = run_naively(attack, world, cases_for(attack, world))
            succeeded += [attack.name] if attack.succeeded(world, outcome) else []
    assert set(ATTACKS) > set(succeeded)
    assert len(succeeded) >= 15 and "tester_scope" in succeeded, succeeded


def test_a_harmed_world_is_noticed():
    """The checks of the attacks see each kind of harm."""
    with make_world() as world:
        assert not world.touched() and not world.victim_harmed() and not world.contacted()
        (world.folder / "witness").write_text("owned")
        assert world.touched()
        world.reset()
        world.victim.kill()
        world.victim.wait()
        assert world.victim_harmed()
        world.reset()
        assert not world.touched() and not world.victim_harmed()


@pytest.mark.slow
def test_attacks_bite_without_isolation():
    row = sandbox_rows.naive_row(seed=3)
    assert row.passed, row.detail


@pytest.mark.slow
def test_hostile_row():
    row = sandbox_rows.hostile_row(seed=3)
    assert row.passed, row.detail
