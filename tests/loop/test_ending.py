"""What a run says at its end, in numbers, and how it is continued; which of its steps were the best."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from gspo.build.data.given import Inputs
from gspo.config.schema.trainer import EarlyStopConfig
from gspo.exit_codes import EXIT_PAUSED
from gspo.loop import ending
from gspo.loop.best import best_steps, held_out_figure, why_stop
from gspo.loop.counters import Counters
from gspo.loop.ending import write_report
from gspo.loop.guards.alarms import Paused
from gspo.runs.group_log import write_records
from tests.loop.test_when import Heard

ACCURACY, REWARD = "val-core/a/acc/mean@4", "val-core/a/reward/mean@4"


def test_a_run_without_evaluations_has_a_result_without_accuracies(run):
    run.append_metrics(1, {"x": 1.0, "val-aux/a/tool_calls/share": 0.5})
    got = ending.result(run, 1, Counters(seconds=2.04))
    assert (got["start_acc"], got["final_acc"], got["start_ci"], got["final_ci"]) == (None,) * 4
    assert got["seconds"] == 2.0 and "tool_calls_start" not in got


def test_an_accuracy_of_0_is_an_accuracy(run):
    for step, accuracy in ((0, 0.0), (2, 0.5), (4, 0.0)):
        run.append_metrics(step, {ACCURACY: accuracy})
    run.append_metrics(5, {"x": 1.0})
    got = ending.result(run, 5, Counters())
    assert (got["start_acc"], got["final_acc"], got["steps"], got["generated_tokens"]) == (0.0, 0.0, 5, 0)
    assert best_steps(run.rows(), 2) == [2, 0]


def test_tool_calls_are_those_of_the_evaluations(run):
    for step, share in ((0, 0.25), (3, 0.75)):
        run.append_metrics(step, {ACCURACY: 0.5, "val-aux/a/tool_calls/share": share})
    got = ending.result(run, 3, Counters())
    assert (got["tool_calls_start"], got["tool_calls_final"]) == (0.25, 0.75)


def question(uid: str, acc: float | None, text: str = "x", messages=({"content": "first"}, {"content": "last"})):
    first = {"acc": acc, "text": text, "num_tokens": 3}
    other = {"acc": 1.0, "text": "another", "num_tokens": 99}  # the first response is the one that is compared
    return {"uid": uid, "ground_truth": 7, "messages": list(messages), "responses": [first, other]}


def test_examples_are_questions_that_became_right_up_to_their_number(run):
    before = [question("a", 0.5), question("b", 0.5, messages=()), question("c", 0.51), question("d", 0.0)]
    after = [question("a", 1.0, "new"), question("b", 1.0), question("c", 0.5), question("d", 0.51)]
    write_records(run.evals, 0, before, held_out=True)
    write_records(run.evals, 2, [question("z", 1.0)], held_out=True)  # neither the first nor the last
    write_records(run.evals, 10, after, held_out=True)
    outcome = {"start_acc": 0.25, "final_acc": 0.75, "steps": 1, "seconds": 61.6}
    shown = []
    for num_examples in (0, 2, 9):
        console = Heard()
        ending.show_change(console, run, outcome, num_examples)
        assert console.lines == [
            "held-out accuracy 0.250 → 0.750 in 1 step and 62 s: of 4 questions, 3 became right and 1 wrong; answers "
            "went from 3.0 to 3.0 tokens"
        ]
        shown.append(console.tables)
    assert shown[0] == [] and len(shown[2][0]) == 3
    assert shown[1] == [[["last", "7", "x", "new"], ["b", "7", "x", "x"]]]


def test_a_run_with_one_evaluation_shows_no_change(run):
    write_records(run.evals, 0, [question("a", 1.0)], held_out=True)
    console = Heard()
    ending.show_change(console, run, {"start_acc": 0.5, "final_acc": 0.5, "steps": 2, "seconds": 1.0}, 1)
    assert console.lines == []


@pytest.mark.parametrize(
    ("rewards", "steps", "said"),
    [
        ([0.25, None, 0.5], 2, ["held-out reward 0.250 → 0.500 in 2 steps and 3 s"]),
        ([0.25, 0.75], 1, ["held-out reward 0.250 → 0.750 in 1 step and 3 s"]),
        ([0.25], 2, []),
    ],
)
def test_without_an_accuracy_the_change_is_that_of_the_reward(run, rewards, steps, said):
    for step, value in enumerate(rewards):
        run.append_metrics(step, {} if value is None else {REWARD: value})
    for step in (0, 2):
        write_records(run.evals, step, [question("a", None)], held_out=True)
    console = Heard()
    ending.show_change(console, run, {"start_acc": None, "final_acc": None, "steps": steps, "seconds": 3.2}, 1)
    assert console.lines == said


@pytest.mark.parametrize("in_python", [True, False])
def test_a_run_that_ended_before_its_last_step_says_how_it_goes_on(run, in_python):
    console = Heard()
    commands: list[str] = []
    console.command = commands.append
    trainer = SimpleNamespace(
        run=run,
        console=console,
        step=3,
        total_steps=9,
        command="sft",
        inputs=Inputs(reward_fn=len) if in_python else Inputs(),
        stop=SimpleNamespace(exit_code=130),
        alarms=SimpleNamespace(file=run.path / "alarms.jsonl"),
        result=lambda: {"steps": 3},
    )
    assert ending.stopped(trainer) == {"steps": 3, "stopped": 130}
    assert f"stopped at step 3 of 9; saved in {run.path}. Continue " in console.lines[0]
    setting = f"trainer.resume_mode={run.path}"
    command = f"gspo sft {run.config_file} trainer.experiment_name=run"
    assert ("the same Python program" in console.lines[0]) == in_python
    assert commands == [f"  {setting if in_python else command}"]
    extended = ending.command_to_go_on(trainer, "a=1", "b=2")
    assert extended == f"{setting if in_python else command} a=1 b=2"
    assert ending.paused(trainer, Paused("an alarm paused it")) == {"steps": 3, "stopped": EXIT_PAUSED}
    assert console.lines[1].startswith(f"an alarm paused it; saved in {run.path}, the alarm is in alarms.jsonl.")


def test_model_cards_that_cannot_be_written_are_a_warning(run, monkeypatch):
    console, warned = Heard(), []
    console.warn = warned.append

    def full(folder):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ending, "write_cards", full)
    monkeypatch.setattr(ending.report, "write_report", lambda path, warn: path / "page.html")
    write_report(console, run)
    assert len(warned) == 1 and "No space left" in warned[0] and console.lines == [f"report: {run.path / 'page.html'}"]
    monkeypatch.setattr(ending.report, "write_report", lambda path, warn: None)
    write_report(console, run)
    assert len(console.lines) == 1


@pytest.mark.parametrize(
    ("row", "metric", "figure"),
    [
        ({ACCURACY: 0.25, REWARD: 0.75, "val/loss": 2.0}, None, 0.25),
        ({REWARD: 0.75, "val/loss": 2.0}, None, 0.75),
        ({"val/loss": 2.0}, None, -2.0),
        ({ACCURACY: 0.25, "val/perplexity": 3.0}, "val/perplexity", -3.0),
        ({ACCURACY: 0.25, "x/loss_scale": 3.0}, "x/loss_scale", 3.0),
        ({ACCURACY: 0.25, "mine": 0}, "mine", 0),
        ({ACCURACY: 0.25}, "mine", None),
        ({"mine": None}, "mine", None),
        ({"mine": float("nan")}, "mine", None),
        ({"mine": float("inf")}, "mine", None),
        ({"mine": "1"}, "mine", None),
        ({}, None, None),
    ],
)
def test_a_row_is_judged_by_accuracy_else_reward_else_loss_or_by_the_named_metric(row, metric, figure):
    assert held_out_figure({"step": 1, **row}, metric) == figure


MISSING = "val-aux/{}/reward_failures/share"


@pytest.mark.parametrize(
    ("shares", "metric", "figure"),
    [
        ({"a": 0.5}, None, 0.25),  # half of the rewards are enough
        ({"a": 0.51}, None, None),
        ({"a": 0.1, "org/code": 0.75}, None, None),  # the mean of all sources needs each of them
        ({"org/code": 0.75}, ACCURACY, 0.25),
        ({"a": 0.75}, ACCURACY, None),
        ({"a": 0.75}, "mine", 1.0),
    ],
)
def test_an_evaluation_without_most_of_its_rewards_is_not_judged(shares, metric, figure):
    row = {ACCURACY: 0.25, "mine": 1.0, **{MISSING.format(source): share for source, share in shares.items()}}
    assert held_out_figure({"step": 1, **row}, metric) == figure
    known = [{"step": 0, ACCURACY: 0.125}, {"step": 1, **row}]
    assert metric or best_steps(known, 1) == ([0] if figure is None else [1])
    settings = EarlyStopConfig(patience=1, metric=metric)
    worse = [{"step": 0, ACCURACY: 0.5, "mine": 1.0}, {"step": 1, **row}]
    assert (why_stop(worse, settings) is None) == (figure is None)


def rows(*values: float | None) -> list[dict]:
    return [{"step": 2 * number, **({} if v is None else {ACCURACY: v})} for number, v in enumerate(values)]


def test_the_best_of_no_steps_are_none_and_of_few_all():
    known = rows(0.1, 0.3, None, 0.3)
    assert best_steps(known, 9) == [2, 6, 0] and best_steps(known, 1) == [2]
    assert best_steps(known, 2, among=[]) == [] and best_steps(known, 1, among=[0, 6]) == [6]
    assert best_steps(known, 0) == []


@pytest.mark.parametrize(
    ("values", "patience", "min_delta", "said"),
    [
        ([0.5, 0.5], 1, 0.0, "in 1 evaluation since step 0 (0.500)"),
        ([0.5], 1, 0.0, None),
        ([0.5, 0.75, 0.75, 0.75, 0.75], 2, 0.0, "in 3 evaluations since step 2 (0.750)"),
        ([0.5, 0.75, 0.75], 2, 0.0, None),
        ([0.5, 0.75, 0.75], 2, 0.25, "in 2 evaluations since step 0 (0.500)"),  # a gain of the margin itself is none
        ([0.5, 0.875, 1.0], 1, 0.25, "in 1 evaluation since step 2 (0.875)"),
        ([0.5, 0.625, 0.75, 0.875], 3, 0.25, None),  # small gains add up
    ],
)
def test_patience_counts_evaluations_since_the_last_gain_beyond_the_margin(values, patience, min_delta, said):
    reason = why_stop(rows(*values), EarlyStopConfig(patience=patience, min_delta=min_delta))
    assert (reason is None) == (said is None)
    assert reason is None or (said in reason and f"trainer.early_stop.patience={patience}" in reason)
