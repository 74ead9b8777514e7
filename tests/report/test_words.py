"""Numbers in words, and the sentences and tiles that a run gets for its metrics: values worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.report import words
from gspo.report.comparison import compare_runs
from gspo.report.overview import overview
from gspo.report.verdict import judge
from gspo.runs.group_log import write_records
from gspo.runs.run import Run, read_run


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (9.94, "9.9 s"),
        (10.4, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (72, "1 min 12 s"),
        (3599, "59 min 59 s"),
        (3600, "1 h 00 min"),
        (11_159, "3 h 05 min"),
        (86_400, "1 d 0 h"),
        (187_300, "2 d 4 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert words.duration(seconds) == text


def test_counts_and_shares() -> None:
    counts = [words.count(n) for n in (950, 12_400, 999_999, 1e6, 3_440_000, 1.2e9)]
    assert counts == ["950", "12,400", "999,999", "1 million", "3.44 million", "1.2 billion"]
    assert (words.percent(0.8649), words.percent(0.8649, 0), words.points(-0.453)) == ("86.5 %", "86 %", "-45.3 points")
    assert words.interval(0.8304, 0.894) == "83.0 to 89.4 %"
    assert words.name_of(["/home/me/a.jsonl", 3]) == "…/a.jsonl, 3" and words.name_of(None) == "none"


def run_of(folder: Path, *rows: dict[str, Any], **files: Any) -> Run:
    folder.mkdir(exist_ok=True)
    numbered = [{"step": step, **row} for step, row in enumerate(rows, start=1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in numbered))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return read_run(folder)


def test_what_a_run_cost_is_the_sum_over_its_steps(tmp_path: Path) -> None:
    step = {"train/generated_tokens": 1000, "train/wasted_tokens": 250, "train/groups_kept": 6, "timing_s/step": 3.0}
    dropped = {"train/groups_all_right": 3, "train/groups_stale_dropped": 1, "train/groups_surplus": 0}
    run = run_of(tmp_path / "run", step, {**step, **dropped}, {**step, "train/groups_all_wrong": 2})
    (cost,) = [s for s in judge(run).sentences if "generated" in s]
    assert cost == (
        "It generated 3,000 tokens in training, of which 750 (25 %) were in groups never trained on "
        "(groups: 3 all right, 2 all wrong, 1 stale)."
    )
    tiles = {tile["label"]: (tile["value"], tile["detail"]) for tile in overview(run)["tiles"]}
    assert tiles["Generated tokens"] == ("3,000", "25 % in groups never trained on")
    assert tiles["Groups kept"] == ("75 %", "18 of 24")
    assert tiles["Time"] == ("9.0 s", "last step 3.0 s")
    (facts,) = compare_runs([run])["runs"]
    assert (facts["steps"], facts["generated_tokens"], facts["wasted_share"], facts["seconds"]) == (3, 3000, 0.25, 9.0)


def test_the_last_reward_and_the_mean_clip_fraction(tmp_path: Path) -> None:
    actor = "actor_rollout_ref.actor"
    settings = {f"{actor}.clip_ratio": 0.2, f"{actor}.clip_ratio_low": None, f"{actor}.clip_ratio_high": 0.28}
    records = [{"key": key, "value": value, "origin": "default"} for key, value in settings.items()]
    rows = [
        {"critic/score_all/mean": 0.25, "critic/score/mean": 0.5, "actor/pg_clipfrac": share} for share in (0.1, 0.3)
    ]
    rows[1]["critic/score_all/mean"] = 0.125
    run = run_of(tmp_path / "run", *rows, config=records)
    tiles = {tile["label"]: (tile["value"], tile["detail"]) for tile in overview(run)["tiles"]}
    assert tiles["Reward, last step"] == ("0.125", "all groups; trained groups 0.500")
    assert tiles["Clip fraction"] == ("20.0 %", "mean over steps; band −0.2 to +0.28")
    assert judge(run).headline == "Training reward fell from 0.250 to 0.125; no held-out evaluation yet"
    moved = run_of(
        tmp_path / "run", {**rows[0], "actor/clip_ratio_low": 0.01, "actor/clip_ratio_high": 0.01}, config=records
    )
    tiles = {tile["label"]: tile["detail"] for tile in overview(moved)["tiles"]}
    assert tiles["Clip fraction"] == "mean over steps; band ±0.01"


def test_a_branch_names_its_parent_and_what_differs(tmp_path: Path) -> None:
    changed = [
        {"key": "trainer.seed", "from": 0, "to": 1},
        {"key": "data.train_files", "from": None, "to": "/x/b.jsonl"},
    ]
    for changes, text in ((changed, ", with trainer.seed 0 → 1, data.train_files none → …/b.jsonl."), ([], ".")):
        run = run_of(tmp_path / "run", {"x": 1}, ancestry={"run": "/runs/parent", "step": 3, "changed": changes})
        assert f"It is a branch of …/parent at step 3{text}" in judge(run).sentences


def test_alarms_are_counted_and_the_last_is_told(tmp_path: Path) -> None:
    alarms = [{"step": step, "name": "n", "text": f"alarm {step}", "action": "warn"} for step in (2, 5)]
    for number, text in (
        (1, "One alarm was raised; the last, at step 2: alarm 2"),
        (2, "2 alarms were raised; the last, at step 5: alarm 5"),
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "alarms.jsonl").write_text("".join(json.dumps(alarm) + "\n" for alarm in alarms[:number]))
        assert judge(run_of(folder, {"x": 1})).sentences[-1] == text


@pytest.mark.parametrize(
    ("intervals", "tone"), [(([0.1, 0.3], [0.31, 0.5]), "good"), (([0.1, 0.3], [0.29, 0.5]), "flat"), (None, "flat")]
)
def test_without_recorded_questions_a_change_is_clear_where_the_intervals_are_apart(
    tmp_path: Path, intervals: Any, tone: str
) -> None:
    ends = dict(zip(("start_ci", "final_ci"), intervals)) if intervals else {}
    run = run_of(tmp_path / "run", {"x": 1}, result={"start_acc": 0.2, "final_acc": 0.4, "steps": 1, **ends})
    assert judge(run).tone == tone
    if intervals:  # the same fall, told the other way round
        ends = dict(zip(("final_ci", "start_ci"), intervals))
        run = run_of(tmp_path / "run", {"x": 1}, result={"start_acc": 0.4, "final_acc": 0.2, "steps": 1, **ends})
        assert judge(run).tone == {"good": "bad", "flat": "flat"}[tone]


def with_evals(folder: Path, *evals: list[dict[str, Any]]) -> None:
    (folder / "evals").mkdir(parents=True)
    for step, records in enumerate(evals):
        write_records(folder / "evals", step, records, held_out=True)


def asked(uid: str, acc: float | None, score: float | None = None, text: str = "t") -> dict[str, Any]:
    message = {"role": "user", "content": f"{uid}?"}
    return {
        "uid": uid,
        "messages": [message],
        "ground_truth": 1,
        "responses": [{"acc": acc, "score": score, "text": text}],
    }


@pytest.mark.parametrize(
    ("rows", "headline", "tone"),
    [
        ([{"train/loss": 2.0}, {"train/loss": 1.0}], "Training loss fell from 2.000 to 1.000", "none"),
        ([{"train/loss": 1.0}, {"train/loss": 2.0}], "Training loss rose from 1.000 to 2.000", "none"),
        ([{"train/loss": 1.0}, {"train/loss": 1.0}], "Training loss stayed from 1.000 to 1.000", "none"),
        ([{"train/loss": 1.0, "val/loss": 3.0}, {"val/loss": 2.0}], "Held-out loss fell from 3.000 to 2.000", "good"),
        ([{"train/loss": 1.0, "val/loss": 2.0}, {"val/loss": 3.0}], "Held-out loss rose from 2.000 to 3.000", "bad"),
        ([{"train/loss": 1.0}], "Step 1: nothing to judge yet", "none"),
        (
            [{"val-core/a/reward/mean@1": 0.5}, {"critic/score/mean": 9.0}, {"val-core/a/reward/mean@1": 0.75}],
            "Held-out reward rose from 0.500 to 0.750",
            "none",
        ),
        (
            [{"critic/score/mean": 0.5}, {"critic/score/mean": 0.5}],
            "Training reward stayed from 0.500 to 0.500; no held-out evaluation yet",
            "none",
        ),
        ([{"critic/score/mean": 0.5}], "Step 1: nothing to judge yet", "none"),
        ([], "No metrics yet", "none"),
    ],
)
def test_the_headline_is_about_the_best_figure_that_is_known(tmp_path: Path, rows, headline, tone) -> None:
    verdict = judge(run_of(tmp_path / "run", *rows))
    assert (verdict.headline, verdict.tone) == (headline, tone)


def test_a_change_is_judged_over_the_same_questions(tmp_path: Path) -> None:
    names = [str(number) for number in range(40)]
    for folder, end, headline, tone in (
        ("up", 1.0, "Held-out accuracy rose from 10.0 % to 90.0 %", "good"),
        ("same", 0.0, "No clear change in held-out accuracy: from 10.0 % to 90.0 %", "flat"),
    ):
        with_evals(tmp_path / folder, [asked(n, 0.0) for n in names], [asked(n, end) for n in names])
        run = run_of(tmp_path / folder, {"x": 1}, result={"start_acc": 0.1, "final_acc": 0.9, "steps": 1})
        verdict = judge(run)
        assert (verdict.headline, verdict.tone) == (headline, tone)
    assert "Over the same 40 questions the change is +0.0 points" in verdict.sentences[-1]
    assert "0 answered better, 0 worse." in verdict.sentences[-1]


def test_accuracies_come_from_the_result_else_from_the_rows(tmp_path: Path) -> None:
    name = "val-core/a/acc/mean@1"
    rows = [{name: 0.25, "val-aux/a/acc/ci_low": 0.125, "val-aux/a/acc/ci_high": 0.375}, {"x": 1}, {name: 0.5}]
    run = run_of(tmp_path / "rows", *rows)
    assert run.accuracy == [(1, 0.25), (3, 0.5)] and run.interval("start") == (0.125, 0.375)
    assert run.interval("final") is None
    tiles = {tile["label"]: (tile["value"], tile["detail"]) for tile in overview(run)["tiles"]}
    assert tiles["Held-out accuracy"] == ("25.0 → 50.0 %", "")
    ends = {"start_acc": 0.125, "final_acc": 0.75, "steps": 3, "final_ci": [0.5, 0.875], "seconds": 61}
    run = run_of(tmp_path / "rows", *rows, result=ends)
    tiles = {tile["label"]: (tile["value"], tile["detail"]) for tile in overview(run)["tiles"]}
    assert tiles["Held-out accuracy"] == ("12.5 → 75.0 %", "95 % interval 50.0 to 87.5 %")
    assert tiles["Time"] == ("1 min 01 s", "")
    once = run_of(tmp_path / "once", {"x": 1}, rows[0])
    tiles = {tile["label"]: (tile["value"], tile["detail"]) for tile in overview(once)["tiles"]}
    assert tiles["Held-out accuracy"] == ("25.0 %", "at step 2")


def test_the_figures_of_a_supervised_run(tmp_path: Path) -> None:
    rows = [
        {"val/loss": 2.0, "val/perplexity": 7.389},
        {"train/loss": 1.25},
        {"val/loss": 1.0, "val/perplexity": 2.718},
    ]
    tiles = {t["label"]: (t["value"], t["detail"]) for t in overview(run_of(tmp_path / "run", *rows))["tiles"]}
    assert tiles["Held-out loss"] == ("2.000 → 1.000", "perplexity 2.72")
    assert tiles["Training loss, last step"] == ("1.250", "per answer token")
    tiles = {t["label"]: (t["value"], t["detail"]) for t in overview(run_of(tmp_path / "one", rows[0]))["tiles"]}
    assert tiles == {"Held-out loss": ("2.000", "perplexity 7.39")}


def test_samples_are_the_questions_that_improved_most(tmp_path: Path) -> None:
    before = [asked("a", 1.0), asked("b", None, 0.25, "old b"), asked("c", 0.5, 0.0), asked("d", None), asked("e", 0.0)]
    after = [asked("a", 1.0), asked("b", None, 1.0, "new b"), asked("c", 0.25, 1.0), asked("d", 1.0), asked("f", 1.0)]
    with_evals(tmp_path / "run", before, [asked("b", 0.0)], after)
    samples = overview(run_of(tmp_path / "run", {"x": 1}))["samples"]
    assert [(s["question"], s["scores"]) for s in samples] == [
        ("d?", [0.0, 1.0]),
        ("b?", [0.25, 1.0]),
        ("a?", [1.0, 1.0]),
    ]
    assert (samples[1]["before"], samples[1]["after"], samples[1]["truth"]) == ("old b", "new b", "1")


def test_questions_that_were_trained_on_are_said(tmp_path: Path) -> None:
    facts = {"held_out": {"questions": 1200, "also_trained_on": 30}}
    run = run_of(tmp_path / "run", {"x": 1}, environment=facts)
    assert judge(run).sentences[0].startswith("30 of the 1,200 evaluation questions are also training rows")
    none = {"held_out": {"questions": 1200, "also_trained_on": 0}}
    assert judge(run_of(tmp_path / "run", {"x": 1}, environment=none)).sentences == []


@pytest.mark.parametrize(
    ("total", "result", "text"),
    [
        (9, None, "was trained (stopped before its end) on b.jsonl with DAPO: 2 of 9 steps in 4.0 s."),
        (2, None, "was trained (stopped before its end) on b.jsonl with DAPO: 2 steps in 4.0 s."),
        (9, {"steps": 2, "seconds": 72}, "was trained on b.jsonl with DAPO: 2 steps in 1 min 12 s."),
    ],
)
def test_what_was_trained_on_what_for_how_long(tmp_path: Path, total, result, text) -> None:
    settings = {
        "actor_rollout_ref.model.path": "org/tiny",
        "data.train_files": "b.jsonl",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "dapo",
        "trainer.total_training_steps": total,
    }
    config = [{"key": key, "value": value, "origin": ""} for key, value in settings.items()]
    files = {"config": config} | ({"result": result} if result else {})
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("999999999")
    run = run_of(tmp_path / "run", {"timing_s/step": 1.0}, {"timing_s/step": 3.0}, **files)
    assert judge(run).sentences[0] == f"The model org/tiny {text}"


def test_runs_are_compared_by_question_and_by_their_settings(tmp_path: Path) -> None:
    names = [str(number) for number in range(50)]
    runs = []
    for name, values in (("one", [0.0] * 50), ("two", [1.0] * 49), ("three", [1.0] + [0.0] * 48)):
        with_evals(tmp_path / name, [asked("x", 1.0)], [asked(n, v) for n, v in zip(names, values)])
        settings = {"trainer.seed": len(runs), "trainer.experiment_name": name, "same": 1}
        settings |= {"own": 5} if name == "two" else {}
        config = [{"key": key, "value": value, "origin": ""} for key, value in settings.items()]
        rows = [{"train/generated_tokens": 10, "timing_s/step": 2.0}, {"train/generated_tokens": 5}]
        runs.append(run_of(tmp_path / name, *rows, config=config))
    found = compare_runs(runs)
    assert found["config"] == [
        {"key": "trainer.seed", "values": [{"value": n, "missing": False} for n in range(3)]},
        {"key": "own", "values": [{"value": 5 if n == 1 else None, "missing": n != 1} for n in range(3)]},
    ]
    assert [(d["a"], d["b"], d["left_out"]) for d in found["differences"]] == [("one", "two", 1), ("one", "three", 1)]
    better, unclear = found["sentences"]
    assert better.startswith("two is better than one by 100.0 points over the same 49 held-out questions (1 were not")
    assert unclear.startswith("No clear difference between three and one: +2.0 points over the same 49")
    curves = found["runs"][0]["curves"]
    assert (curves["tokens"], curves["seconds"], curves["step"]) == ([10, 15], [2.0, 2.0], [1, 2])
    back = compare_runs([runs[1], runs[0]])["sentences"][0]
    assert back.startswith("one is worse than two by 100.0 points")
    alone = run_of(tmp_path / "alone", {"x": 1})
    assert compare_runs([runs[0], alone])["sentences"] == [
        "alone and one share no held-out question, so their accuracies cannot be paired."
    ]
