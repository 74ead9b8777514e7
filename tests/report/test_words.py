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
