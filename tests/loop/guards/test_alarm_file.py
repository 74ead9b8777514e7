"""The alarms of a run folder: what is on file after a resume, how rollbacks are counted, and the limits of each rule."""

from __future__ import annotations

import json

import pytest

from gspo.loop.guards import alarms
from gspo.loop.guards.alarms import RULES, Alarms, AlarmWatch, checkpoint_before
from gspo.runs.folder import RunFolder
from tests.loop.guards.test_alarms import HEALTHY, names
from tests.support import small_checkpoint


@pytest.fixture
def run(tmp_path):
    run = RunFolder(tmp_path / "run").open()
    yield run
    run.close()


def save(run: RunFolder, step: int) -> None:
    small_checkpoint.save(run.checkpoints, step)


def made(*steps: int):
    return lambda rows: "made to go off" if rows[-1]["step"] in steps else None


def on_file(run: RunFolder) -> list[tuple]:
    lines = (run.path / "alarms.jsonl").read_text().splitlines()
    return [(a["step"], a["name"], a["action"]) for a in map(json.loads, lines)]


def test_two_alarms_of_one_step_are_one_rollback(run, monkeypatch):
    monkeypatch.setitem(RULES, "one", made(3, 7))
    monkeypatch.setitem(RULES, "two", made(3))
    for step in (1, 2):
        save(run, step)
    said = []
    found = Alarms(run, "rollback", said.append)
    assert [found.check(step, HEALTHY, 0) for step in (1, 2, 3)] == ["warn", "warn", "rollback"]
    assert on_file(run) == [(3, "one", "rollback"), (3, "two", "rollback")]
    assert found.num_rollbacks() == 1
    assert len(said) == 2 and "alarm at step 3: one: made to go off" in said
    # Of a resumed run, too, which reads the file; one rollback is allowed.
    again = Alarms(run, "rollback", said.append)
    again.restore(2, [{**HEALTHY, "step": step} for step in range(3)])
    assert again.num_rollbacks() == 1
    assert again.check(7, HEALTHY, again.num_rollbacks()) == "pause"


def test_a_resume_forgets_later_alarms_but_not_rollbacks_and_knows_what_goes_on(run, monkeypatch):
    monkeypatch.setitem(RULES, "made", made(2, 3, 5))
    found = Alarms(run, "warn", lambda text: None)
    for step in range(6):
        found.check(step, HEALTHY, 0)
    assert on_file(run) == [(2, "made", "warn"), (5, "made", "warn")]
    with open(found.file, "a") as f:
        f.write(json.dumps({"step": 9, "name": "other", "text": "x", "action": "rollback"}) + '\n{"step": 9, "na')
    again = Alarms(run, "warn", lambda text: None)
    again.restore(2, [{**HEALTHY, "step": step} for step in range(6)])
    assert on_file(run) == [(2, "made", "warn"), (9, "other", "rollback")]
    assert again.check(3, HEALTHY, 0) == "warn"
    assert len(on_file(run)) == 2  # the condition began in step 2 and has not ended
    again.check(4, HEALTHY, 0), again.check(5, HEALTHY, 0)
    assert on_file(run)[-1] == (5, "made", "warn")


def test_a_resumed_run_keeps_its_own_rules(run):
    found = Alarms(run, "warn", lambda text: None, rules={"made": made(3)})
    for watched in (found, Alarms(run, "warn", lambda text: None, rules={"made": made(3)})):
        if watched is not found:
            watched.restore(0, [{**HEALTHY, "step": 0}])
        watched.check(2, {**HEALTHY, "actor/seq_importance_ratio/max": 99.0}, 0)
        watched.check(3, HEALTHY, 0)
    assert on_file(run) == [(3, "made", "warn")]


def test_a_rollback_uses_the_newest_whole_checkpoint_of_an_earlier_step(run):
    assert checkpoint_before(run.checkpoints, 5) is None
    for step in (2, 9, 11, 12):
        save(run, step)
    assert checkpoint_before(run.checkpoints, 12).name == "step-000011"
    (run.checkpoints / "step-000011" / "config.json").write_text("[]")
    assert checkpoint_before(run.checkpoints, 12).name == "step-000009"
    assert checkpoint_before(run.checkpoints, 9).name == "step-000002"
    assert checkpoint_before(run.checkpoints, 2) is None


@pytest.mark.parametrize(
    ("on_alarm", "rollbacks", "action"),
    [("warn", 0, "warn"), ("pause", 0, "pause"), ("rollback", 0, "rollback"), ("rollback", 1, "pause")],
)
def test_the_action_of_an_alarm(run, monkeypatch, on_alarm, rollbacks, action):
    monkeypatch.setitem(RULES, "made", made(3))
    save(run, 1)
    assert Alarms(run, on_alarm, lambda text: None).check(3, HEALTHY, rollbacks) == action


LIMITS = [
    ("actor/seq_importance_ratio/max", 10.0, 10.1, "ratio_explosion"),
    ("actor/seq_importance_ratio", 1.99, 2.0, "ratio_explosion"),
    ("actor/seq_importance_ratio", 0.51, 0.5, "ratio_explosion"),
    ("actor/pg_clipfrac_later", 0.8, 0.81, "clip_fraction"),
    ("actor/entropy", 0.03, 0.029, "entropy_collapse"),
    ("train/filtered_prompts_ratio", 0.05, 0.049, "keep_rate"),
    ("response_length/mean", 5.0, 4.9, "length_collapse"),
    ("response_length/clip_ratio", 0.5, 0.51, "answers_cut"),
    ("critic/skipped_updates", 0.0, 1.0, "not_finite"),
]


@pytest.mark.parametrize(("name", "quiet", "loud", "alarm"), LIMITS)
def test_a_rule_begins_just_beyond_its_limit(name, quiet, loud, alarm):
    assert names({}, {}, {}, {name: quiet})[3] == []
    assert names({}, {}, {}, {name: loud})[3] == [alarm]


def test_what_is_normal_is_what_the_first_rows_said():
    """A slow fall is compared with the start of the run, not with the rows before."""
    falling = [{"response_length/mean": 20.0 * 0.8**i} for i in range(12)]
    found = names(*falling)
    assert [i for i, row in enumerate(found) if "length_collapse" in row] == [8]
    assert names({}, {}, {"response_length/mean": 1.0}) == [[]] * 3  # too few rows to know


def test_a_rule_is_silent_where_its_cause_is_another():
    few = {"train/filtered_prompts_ratio": 0.0, "train/groups_generated": 19}
    assert names({}, {}, {}, few)[3] == []  # too few groups to say anything about a share
    assert names({}, {}, {}, {**few, "train/groups_generated": 20})[3] == ["keep_rate"]
    cut = {"response_length/clip_ratio": 0.6}
    assert names(cut, cut, cut, cut, {"response_length/clip_ratio": 0.9}) == [[]] * 5  # it was so from the start
    held_out = {"val-core/a/acc/mean@1": 0.3}
    assert names({"val-core/a/acc/mean@1": 0.5}, {}, {}, held_out)[3] == []  # the training reward did not rise
    first = {"actor/pg_clipfrac": 0.9, "actor/pg_clipfrac_later": 0.1}
    assert names(first) == [[]]  # the later mini-batches count where they are known


def test_reward_hacking_compares_with_the_best_evaluation_and_the_reward_at_that_time():
    rows = [
        {"val-core/a/acc/mean@1": 0.4, "critic/score_all/mean": 0.3},
        {"val-core/a/acc/mean@1": 0.6, "critic/score_all/mean": 0.5},
        {"critic/score_all/mean": 0.6},
        {"val-core/a/acc/mean@1": 0.5, "critic/score_all/mean": 0.7},
    ]
    assert names(*rows)[3] == ["reward_hacking"]
    watch = AlarmWatch()
    texts = [a.text for i, row in enumerate(rows) for a in watch.observe({**HEALTHY, **row, "step": i})]
    assert "from 0.500 to 0.700" in texts[0] and "from 0.600 to 0.500" in texts[0]
    assert alarms.reward_hacking([{**HEALTHY, **row} for row in [rows[0], rows[3]]]) is None  # accuracy rose
