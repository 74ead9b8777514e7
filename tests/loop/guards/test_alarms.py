"""Alarms: each rule goes off for its cause and not for success; warn, pause and rollback do what they say."""

from __future__ import annotations

import json
import math
import random

import pytest

from gspo.exit_codes import EXIT_PAUSED
from gspo.loop import training_run
from gspo.loop.guards import alarms
from gspo.loop.guards.alarms import RULES, AlarmWatch
from gspo.loop.run import run_program as run_train
from gspo.loop.trainer import Trainer
from gspo.runs.console import Console
from tests.loop.runs import fit
from tests.support.small_run import config, even_first_byte, final_state, make_model

REWARD, HELD_OUT = "critic/score_all/mean", "val-core/a/acc/mean@1"
HEALTHY = {
    "actor/pg_loss": 0.01,
    "actor/grad_norm": 0.3,
    "actor/entropy": 0.6,
    "actor/skipped_updates": 0.0,
    "actor/seq_importance_ratio": 1.0,
    "actor/seq_importance_ratio/min": 0.02,  # one short answer that became unlikely
    "actor/seq_importance_ratio/max": 1.01,
    "actor/pg_clipfrac": 0.1,
    "actor/pg_clipfrac_later": 0.15,
    "critic/score_all/mean": 0.4,
    "critic/score/mean": 0.5,
    "train/filtered_prompts_ratio": 0.6,
    "train/groups_generated": 64,
    "train/groups_all_right": 10,
    "response_length/mean": 20.0,
    "response_length/clip_ratio": 0.05,
    "judge/disagreement": 0.1,
}


def names(*changes: dict) -> list[list[str]]:
    """Alarms of each row, in a run of healthy rows with these changes."""
    watch = AlarmWatch()
    return [[a.name for a in watch.observe({**HEALTHY, **c, "step": i})] for i, c in enumerate(changes)]


CAUSES = {
    "not_finite": {"actor/skipped_updates": 1.0},
    "ratio_explosion": {"actor/seq_importance_ratio/max": 12.0},
    "clip_fraction": {"actor/pg_clipfrac_later": 0.85},
    "entropy_collapse": {"actor/entropy": 0.01},
    "gibberish": {"actor/entropy": 2.0, "critic/score_all/mean": 0.2},
    "keep_rate": {"train/filtered_prompts_ratio": 0.04},
    "no_gradient": {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0},
    "length_collapse": {"response_length/mean": 4.0},
    "answers_cut": {"response_length/clip_ratio": 0.7},
    "reward_hacking": {"critic/score_all/mean": 0.9, "val-core/a/acc/mean@1": 0.3},
    "judge_disagreement": {"judge/disagreement": 0.3},
}


def test_alarms_are_those_of_all_rows_although_only_some_are_held():
    choose, changes = random.Random(5), [name for cause in CAUSES.values() for name in cause]
    watch, whole, active = AlarmWatch(), [], set()
    num_alarms = 0
    for step in range(400):
        row = {**HEALTHY, "step": step, "actor/pg_loss": choose.choice((0.01, 0.01 + step))}
        for name in choose.sample(changes, 3):
            row[name] = choose.choice((None, math.nan, 0.0, 0.2, 0.5, 0.9, 3.0, 12.0))
        whole.append(row)
        found = {name: text for name, rule in RULES.items() if (text := rule(whole)) is not None}
        expected = [(name, text) for name, text in found.items() if name not in active]
        assert [(a.name, a.text) for a in watch.observe(row)] == expected
        active, num_alarms = set(found), num_alarms + len(expected)
    assert num_alarms > 100


def test_the_best_evaluation_and_the_reward_after_it_are_remembered():
    accuracies = [0.1] * 5 + [0.9] + [0.5] * 30
    held_out = [{"val-core/a/acc/mean@1": accuracy} for accuracy in accuracies]
    held_out[5]["critic/score_all/mean"] = None  # the reward at that time is the next one that is known
    assert names(*held_out, {**held_out[-1], "critic/score_all/mean": 0.6}) == [[]] * 36 + [["reward_hacking"]]


def test_a_long_run_holds_a_bounded_number_of_rows(monkeypatch):
    held = []
    monkeypatch.setitem(RULES, "made", lambda rows: held.append(len(rows)))
    watch = AlarmWatch()
    for step in range(1000):
        accuracy = {"val-core/a/acc/mean@1": math.sin(step)} if step % 10 == 0 else {}
        watch.observe({**HEALTHY, **accuracy, "step": step})
    assert held[:3] == [1, 2, 3] and max(held[100:]) < 25


@pytest.mark.parametrize("name", CAUSES)
def test_each_rule_goes_off_for_its_cause_alone_and_once(name):
    start = {"val-core/a/acc/mean@1": 0.5}
    seen = names(start, {}, {}, CAUSES[name], CAUSES[name], {}, CAUSES[name])
    assert seen[:3] == [[], [], []] and seen[3] == [name] and seen[4] == [] and seen[6] == [name]


MARGINS = [  # rules that read two metrics: rows on the quiet side of the second one's limit, and beyond it
    ("clip_fraction", {"actor/pg_clipfrac": 0.9}, {"actor/pg_clipfrac": 0.9, "actor/pg_clipfrac_later": None}),
    ("entropy_collapse", {"actor/entropy": 0.029, REWARD: 0.46}, {"actor/entropy": 0.029, REWARD: 0.44}),
    ("gibberish", {"actor/entropy": 1.79, REWARD: 0.2}, {"actor/entropy": 1.81, REWARD: 0.2}),
    ("gibberish", {"actor/entropy": 1.81, REWARD: 0.36}, {"actor/entropy": 1.81, REWARD: 0.34}),
    ("no_gradient", {"critic/advantages/max": 0.0}, {"critic/advantages/min": 0.0, "critic/advantages/max": 0.0}),
    ("reward_hacking", {REWARD: 0.9, HELD_OUT: 0.46}, {REWARD: 0.9, HELD_OUT: 0.44}),
    ("reward_hacking", {REWARD: 0.44, HELD_OUT: 0.3}, {REWARD: 0.46, HELD_OUT: 0.3}),
    ("judge_disagreement", {"judge/disagreement": 0.24}, {"judge/disagreement": 0.26}),
    ("judge_disagreement", {"reward_model/disagreement": 0.34}, {"reward_model/disagreement": 0.36}),
]


@pytest.mark.parametrize(("name", "quiet", "loud"), MARGINS)
def test_each_rule_keeps_its_margin(name, quiet, loud):
    start = [{HELD_OUT: 0.5, "reward_model/disagreement": 0.2}] * 3
    assert names(*start, {"critic/advantages/min": -1.0, **quiet}) == [[]] * 4
    assert names(*start, {"critic/advantages/min": -1.0, **loud}) == [[]] * 3 + [[name]]


def test_what_is_normal_is_the_mean_of_the_first_three_rows():
    lengths = [{"response_length/mean": value} for value in (10.0, 20.0, 60.0)]
    assert names(*lengths, {"response_length/mean": 7.4})[3] == ["length_collapse"]
    assert names(*lengths, {"response_length/mean": 7.6})[3] == []


def test_answers_that_were_cut_from_the_start_are_no_news():
    for share, expected in ((0.25, ["answers_cut"]), (0.26, [])):
        assert names(*[{"response_length/clip_ratio": share}] * 3, {"response_length/clip_ratio": 0.9})[3] == expected


def test_a_loss_that_stands_still_once_does_not_rise_every_step():
    still = [{"actor/pg_loss": 0.01 * max(i, 1)} for i in range(11)]
    assert [i for i, seen in enumerate(names(*still)) if seen] == [10]


def test_a_loss_that_rises_step_after_step():
    assert set(RULES) - set(CAUSES) == {"rising_loss"}
    rising = [{"actor/pg_loss": 0.01 * i} for i in range(12)]
    assert [i for i, seen in enumerate(names(*rising)) if seen] == [9]
    assert names(*rising)[9] == ["rising_loss"]
    broken = [*rising[:5], {"actor/pg_loss": 0.0}, *rising[5:11]]
    assert not any(names(*broken))


def test_a_reward_that_was_not_measured_is_neither_a_fall_nor_a_cause():
    """A step that judged no group has no `critic/score_all/mean`; the last one known counts."""

    def of(*rows: dict) -> list[list[str]]:
        watch = AlarmWatch()
        return [
            [a.name for a in watch.observe({k: v for k, v in {**HEALTHY, **r, "step": i}.items() if v is not None})]
            for i, r in enumerate(rows)
        ]

    absent = {"critic/score_all/mean": None, "train/filtered_prompts_ratio": None, "train/groups_generated": 0}
    risen = {"critic/score_all/mean": 0.9}
    assert not any(of({}, {}, {}, risen, {**absent, "actor/entropy": 0.01}))  # right answers became certain
    assert of({}, {}, {}, {**absent, "actor/entropy": 0.01})[3] == ["entropy_collapse"]
    held = {"val-core/a/acc/mean@1": 0.5}
    fallen = {"val-core/a/acc/mean@1": 0.3}
    assert not any(of(held, {}, {}, {**absent, **fallen}))  # the reward stayed where it was
    assert of(held, {}, risen, {**absent, **fallen})[3] == ["reward_hacking"]


def test_healthy_rows_and_success_raise_nothing():
    learnt = {"critic/score_all/mean": 0.97, "actor/entropy": 0.01, "val-core/a/acc/mean@1": 0.95}
    assert names({"val-core/a/acc/mean@1": 0.3}, {}, {}, {}, learnt, learnt) == [[]] * 6


@pytest.mark.parametrize("value", [float("nan"), float("inf"), None])
def test_a_number_that_is_not_finite_is_named(value):
    (alarm,) = AlarmWatch().observe({**HEALTHY, "actor/grad_norm": value, "step": 0})
    assert alarm.name == "not_finite" and "actor/grad_norm" in alarm.text


def test_every_text_has_a_cause_with_its_number_and_a_remedy():
    assert "12" in (alarms.ratio_explosion([{**HEALTHY, **CAUSES["ratio_explosion"]}]) or "")
    assert "clip_target" in (alarms.clip_fraction([{**HEALTHY, **CAUSES["clip_fraction"]}]) or "")
    easy = {**HEALTHY, "train/filtered_prompts_ratio": 0.01, "train/groups_all_right": 60}
    assert "harder data" in (alarms.keep_rate([easy]) or "")
    assert "easier data" in (alarms.keep_rate([{**easy, "train/groups_all_right": 1}]) or "")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


def at_step(*steps: int):
    """A rule that goes off in these steps."""
    return lambda rows: "made to go off; do nothing" if rows[-1]["step"] in steps else None


def trainer(folder, model, *overrides) -> Trainer:
    return Trainer(config(folder, model, *overrides), reward_fn=even_first_byte, console=Console(enabled=False))


def rows(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def on_file(folder) -> list[tuple]:
    text = (folder / "run" / "alarms.jsonl").read_text()
    return [(a["step"], a["name"], a["action"]) for a in map(json.loads, text.splitlines())]


def test_warn_writes_the_alarm_and_goes_on(tmp_path, model, monkeypatch):
    monkeypatch.setitem(RULES, "made", at_step(2))
    assert trainer(tmp_path, model).fit()["steps"] == 4
    assert on_file(tmp_path) == [(2, "made", "warn")]


def test_pause_saves_stops_with_its_exit_code_and_goes_on_to_the_same_bits(tmp_path, model, monkeypatch):
    monkeypatch.setitem(RULES, "made", at_step(2, 3))
    assert trainer(tmp_path / "warned", model).fit()["steps"] == 4
    resolved = config(tmp_path / "paused", model, "trainer.on_alarm=pause")
    given = {"reward_fn": even_first_byte, "console": Console(enabled=False)}
    assert run_train(resolved, **given) == EXIT_PAUSED
    assert rows(tmp_path / "paused")[-1]["step"] == 2
    assert run_train(resolved, **given) == 0
    assert on_file(tmp_path / "paused") == [(2, "made", "pause")]
    assert final_state(tmp_path / "paused" / "run") == final_state(tmp_path / "warned" / "run")


def test_the_step_of_a_pause_is_counted_among_the_bad_ones(tmp_path, model, monkeypatch):
    monkeypatch.setitem(RULES, "made", at_step(1))
    monkeypatch.setattr(training_run, "skipped_updates", lambda metrics: True)
    run = trainer(tmp_path, model, "trainer.on_alarm=pause")
    assert run.fit()["steps"] == 1
    assert trainer(tmp_path, model, "trainer.on_alarm=pause").counters.bad_steps_in_row == 1


def test_a_run_and_its_continuation_judge_the_same_rows_from_the_evaluation_before_training_on(
    tmp_path, model, monkeypatch
):
    judged: list[list[int]] = []
    monkeypatch.setitem(RULES, "none", lambda history: judged.append([row["step"] for row in history]))
    first = [[0], [0, 1], [0, 1, 2]]
    fit(trainer(tmp_path, model, "trainer.val_before_train=true"), stop_after=2)
    assert judged == first
    judged.clear()
    fit(trainer(tmp_path, model, "trainer.val_before_train=true"))
    assert judged == [*first, [0, 1, 2, 3], [0, 1, 2, 3, 4]]


def test_rollback_returns_once_with_half_the_rate_and_a_repeat_pauses(tmp_path, model, monkeypatch):
    went_off = []

    def twice(history):
        step = history[-1]["step"]
        if step == 3 or (step == 4 and went_off):
            went_off.append(step)
            return "made to go off; do nothing"
        return None

    monkeypatch.setitem(RULES, "made", twice)
    run = trainer(tmp_path, model, "trainer.on_alarm=rollback")
    result = run.fit()
    assert (result["stopped"], result["steps"]) == (EXIT_PAUSED, 3)
    assert on_file(tmp_path) == [(3, "made", "rollback"), (3, "made", "pause")]
    rates = {row["step"]: row["actor/lr"] for row in rows(tmp_path) if "actor/lr" in row}
    assert rates == pytest.approx({1: 1e-3, 2: 1e-3, 3: 5e-4})


def test_a_killed_run_keeps_the_halved_rate_of_its_rollback(tmp_path, model, monkeypatch):
    left = [3]
    monkeypatch.setitem(RULES, "made", lambda r: "x" if r[-1]["step"] in left else None)
    run = trainer(tmp_path, model, "trainer.on_alarm=rollback")
    while run.counters.rollbacks == 0:
        run.train_step()
    assert run.step == 2
    run.close()  # as if killed before the next checkpoint
    left.clear()
    again = trainer(tmp_path, model, "trainer.on_alarm=rollback")
    assert (again.step, again.counters.rollbacks) == (2, 1)
    assert again.fit()["steps"] == 4
    assert [r["actor/lr"] for r in rows(tmp_path) if "actor/lr" in r] == pytest.approx([1e-3, 1e-3, 5e-4, 5e-4])


def test_rollback_without_an_earlier_checkpoint_pauses(tmp_path, model, monkeypatch):
    monkeypatch.setitem(RULES, "made", at_step(1))
    result = trainer(tmp_path, model, "trainer.on_alarm=rollback").fit()
    assert (result["stopped"], result["steps"]) == (EXIT_PAUSED, 1)
