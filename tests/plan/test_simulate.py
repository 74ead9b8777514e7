"""The simulator: closed-form runs, every group accounted for, the same run from the same seed, bounded staleness."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.models.shape import SHAPES
from gspo.plan.constants import DEVICES
from gspo.plan.lengths import Lengths
from gspo.plan.predict import search
from gspo.plan.scenario import Scenario, scenario_of
from gspo.plan.simulate import Simulation, SimulationError, simulate

CALM: dict[str, Any] = {"mtbf_s": math.inf, "sigma": 0.0, "slow_share": 0.0}
ONE = Scenario(
    workers=1, group_slots=1, batch=1, group_size=1, lengths=Lengths(100.0, 100, 0.0), token_s=0.01, single_s=0.01, train_s=0.5,
    save_s=0.1, steps=10, **CALM,
)  # fmt: skip
BUSY = Scenario(
    workers=20, group_slots=4, batch=16, group_size=4, lengths=Lengths(100.0, 400, 0.8), token_s=0.02, single_s=0.01, train_s=2.0,
    save_s=1.0, eta=2, keep_rate=0.6, trainer_devices=8, mtbf_s=4000.0, worker_restart_s=5.0, trainer_restart_s=10.0,
    steps=60,
)  # fmt: skip


def test_one_worker_one_group_takes_turns():
    out = simulate(ONE)
    assert out.seconds == pytest.approx(10 * (1.0 + 0.5))  # 100 tokens of 0.01 s, then 0.5 s of training
    assert out.trainer_idle == pytest.approx(1.0 / 1.5)
    assert out.staleness == {0: 10}


def test_one_version_ahead_hides_training_behind_generation():
    out = simulate(dataclasses.replace(ONE, eta=1, steps=100))
    assert out.step_s == pytest.approx(1.0, rel=0.01)
    assert set(out.staleness) <= {0, 1}
    assert out.rollout_idle == pytest.approx(0.0, abs=0.01)


def test_training_that_takes_longer_decides():
    out = simulate(dataclasses.replace(ONE, eta=1, train_s=3.0, steps=50))
    assert out.step_s == pytest.approx(3.0, rel=0.03)
    assert out.rollout_idle == pytest.approx(2 / 3, abs=0.03)


def test_two_workers_share_a_batch():
    two = dataclasses.replace(ONE, workers=2, batch=4)
    assert simulate(two).step_s == pytest.approx(2 * 1.0 + 0.5)


def test_saves_cost_their_time():
    out = simulate(dataclasses.replace(ONE, save_interval_s=2.9, steps=20, sync=True))
    assert out.saves == 9  # after every second step of 1.5 s
    assert out.seconds == pytest.approx(20 * 1.5 + 9 * 0.1)  # the last one begins when the run ends


def test_a_slow_device_holds_a_batch_up():
    calm = dataclasses.replace(ONE, workers=8, batch=8, steps=20)
    slow = dataclasses.replace(calm, slow_share=0.5, slow_factor=3.0)
    assert simulate(calm).step_s == pytest.approx(1.5)
    assert simulate(slow).step_s == pytest.approx(3.5)


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    eta=st.integers(0, 3),
    keep=st.floats(0.2, 1.0),
    mtbf=st.sampled_from([600.0, 4000.0, math.inf]),
    sync=st.booleans(),
)
def test_every_group_ends_in_one_place_and_none_is_too_old(seed, eta, keep, mtbf, sync):
    scenario = dataclasses.replace(
        BUSY, seed=seed, eta=eta, keep_rate=keep, mtbf_s=mtbf, sync=sync, steps=12, save_interval_s=20.0
    )
    out = simulate(scenario)
    ended = out.trained + out.filtered + out.stale + out.rolled_back
    assert out.submitted == ended + out.in_flight + out.queued + out.training
    assert out.trained == 12 * 16 == sum(out.staleness.values())
    assert max(out.staleness) <= eta
    assert out.stale == 0  # the budget leaves none to grow too old
    assert out.steps == 12
    assert out.training_s + out.saving_s + out.down_s <= out.seconds * (1 + 1e-9)
    assert 0 <= out.busy_slots_s <= out.group_slots * out.seconds * (1 + 1e-9)


class FailingAt(Simulation):
    """A run whose trainer fails at given times."""

    def __init__(self, scenario: Scenario, *times: float) -> None:
        super().__init__(scenario)
        self._times = list(times)

    def _schedule_failure(self, kind: str, num_devices: int, worker: int | None = None) -> None:
        if kind == "trainer_failed" and self._times:
            self._schedule(self._times.pop(0) - self.now, kind)


# A second of generation (1.0 s), half a second of training, 0.1 s of saving, and two seconds until the trainer is back.
@pytest.mark.parametrize(
    ("changes", "times", "seconds", "training", "saving", "down", "busy"),
    [
        ({}, [], 3.0, 1.0, 0.0, 0.0, 2.0),
        ({}, [0.5], 5.5, 1.0, 0.0, 2.0, 2.5),
        ({}, [1.25], 6.25, 1.25, 0.0, 2.0, 3.0),  # in training: a quarter of a second is lost
        ({}, [1.25, 2.25], 7.25, 1.25, 0.0, 3.0, 3.0),  # and again before the trainer is back
        ({"save_interval_s": 0.0}, [], 3.1, 1.0, 0.1, 0.0, 2.0),
        ({"save_interval_s": 0.0}, [1.55], 6.65, 1.5, 0.15, 2.0, 3.0),  # in the first checkpoint
        # Two groups at once: one is paused while the other is trained on.
        ({"workers": 2, "eta": 1, "steps": 1}, [], 1.5, 0.5, 0.0, 0.0, 2.0),
        ({"workers": 2, "eta": 1, "steps": 1, "save_interval_s": 0.0}, [], 1.5, 0.5, 0.0, 0.0, 2.0),
        ({"workers": 2, "eta": 1, "steps": 1}, [1.25], 4.75, 0.75, 0.0, 2.0, 4.0),
        ({"workers": 2, "eta": 1, "steps": 1, "trainer_restart_s": 0.1}, [1.25, 1.4], 3.0, 0.75, 0.0, 0.2, 4.1),
    ],
)
def test_every_second_of_the_trainer_and_of_a_slot_by_hand(changes, times, seconds, training, saving, down, busy):
    settings = {"sync": True, "trainer_restart_s": 2.0, "steps": 2, "save_interval_s": math.inf, **changes}
    out = FailingAt(dataclasses.replace(ONE, **settings), *times).run()
    assert (out.seconds, out.training_s) == pytest.approx((seconds, training))
    assert (out.saving_s, out.down_s, out.busy_slots_s) == pytest.approx((saving, down, busy))
    assert out.trainer_idle == pytest.approx(1 - (training + saving + down) / seconds)
    assert out.rollout_idle == pytest.approx(1 - busy / (settings.get("workers", 1) * seconds))


def test_one_seed_gives_one_run_and_another_gives_another():
    assert simulate(BUSY) == simulate(BUSY)
    assert simulate(BUSY) != simulate(dataclasses.replace(BUSY, seed=1))


def test_failures_cost_steps_and_generation_and_are_counted():
    rough = simulate(dataclasses.replace(BUSY, mtbf_s=400.0, steps=200))
    calm = simulate(dataclasses.replace(BUSY, mtbf_s=math.inf))
    assert calm.worker_failures == calm.trainer_failures == calm.regenerated == calm.rolled_back == 0
    assert rough.worker_failures == pytest.approx(rough.seconds * 20 / 400, rel=0.4)
    assert rough.trainer_failures == pytest.approx(rough.seconds * 8 / 400, rel=0.6)
    assert rough.regenerated > 0
    assert rough.lost_steps > 0 and rough.rolled_back >= rough.lost_steps * 16
    assert rough.step_s > calm.step_s


def test_the_best_interval_beats_saving_always_and_seldom():
    rough = dataclasses.replace(BUSY, mtbf_s=3000.0, steps=150, save_s=4.0)
    best, always, seldom = (
        sum(simulate(dataclasses.replace(rough, save_interval_s=every, seed=s)).seconds for s in range(3))
        for every in (None, 0.0, 1e5)
    )
    assert best < always and best < seldom


def test_a_run_without_progress_is_an_error(monkeypatch):
    monkeypatch.setattr("gspo.plan.simulate.MAX_EVENTS", 20_000)
    with pytest.raises(SimulationError, match="makes no progress"):
        simulate(dataclasses.replace(BUSY, mtbf_s=4.0, train_s=30.0))


@pytest.mark.parametrize("model", ["1.5b", "7b"])
def test_prediction_and_simulation_agree_when_nothing_goes_wrong(model, work):
    wide = dataclasses.replace(work, prompts=128, keep_rate=0.5, max_staleness=2, in_flight=128)
    for made in search(SHAPES[model], DEVICES["h200"], 32, wide).found:
        scenario = scenario_of(made, wide, steps=40, **CALM)
        assert simulate(scenario).step_s == pytest.approx(made.step_s, rel=0.2), made.mode
