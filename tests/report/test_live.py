"""What the dashboard keeps of runs: summaries, what a page already has, and what is dropped to save memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.report import live
from gspo.report.live import LiveRuns, summary
from gspo.report.rollout_store import choose
from gspo.report.thinning import PER_BUCKET
from gspo.runs.metric_table import MetricTable
from gspo.runs.run import Run, read_run

SCORE, TRAINED = "critic/score_all/mean", "critic/score/mean"


def append(run: Path, *rows: dict[str, Any]) -> None:
    run.mkdir(parents=True, exist_ok=True)
    with (run / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def configure(run: Path, **settings: Any) -> None:
    records = [{"key": key.replace("__", "."), "value": value, "origin": ""} for key, value in settings.items()]
    (run / "config.json").write_text(json.dumps(records))


def test_a_summary_says_where_a_run_is_and_how_it_does(tmp_path: Path) -> None:
    run = tmp_path / "run"
    append(
        run, {"step": 0, "val-core/a/acc/mean@1": 0.25, "timing_s/step": 1.5}, {"step": 1, SCORE: 0.5, TRAINED: 0.75}
    )
    append(run, {"step": 2, SCORE: 0.625, "val-core/a/acc/mean@1": 0.5, "timing_s/step": 2.0})
    configure(run, trainer__total_training_steps=9, trainer__tags=["x"], actor_rollout_ref__model__path="/home/me/tiny")
    (run / "alarms.jsonl").write_text('{"step": 1, "text": "x"}\n{"step": 2, "text": "y"}\n')
    found = summary(read_run(run))
    assert (found["name"], found["last_step"], found["total_steps"], found["alarms"]) == ("run", 2, 9, 2)
    assert (found["start_accuracy"], found["accuracy"], found["held_out_reward"]) == (0.25, 0.5, None)
    assert (found["curve"], found["seconds"], found["tags"], found["model"]) == ([0.5, 0.625], 3.5, ["x"], "…/tiny")


def test_a_summary_of_a_run_without_an_accuracy_or_with_odd_settings(tmp_path: Path) -> None:
    run = tmp_path / "run"
    name = "val-core/a/reward/mean@1"
    append(run, {"step": 0, name: -1.0}, {"step": 1, TRAINED: 0.75}, {"step": 2, name: 3.0})
    configure(run, trainer__total_training_steps="many", trainer__tags="x")
    found = summary(read_run(run))
    assert (found["accuracy"], found["start_accuracy"], found["held_out_reward"]) == (None, None, (-1.0, 3.0))
    assert (found["curve"], found["total_steps"], found["tags"]) == ([0.75], None, [])
    bad = summary(Run(run, problems=("p" * 400, "q")))
    assert bad["problems"] == ["p" * 300, "q"] and bad["last_step"] == 0


@pytest.mark.parametrize(("num_rows", "num_points"), [(1, 1), (60, 60), (119, 119), (120, 60), (180, 60), (185, 62)])
def test_the_small_curve_has_the_last_value_and_about_sixty_points(
    tmp_path: Path, num_rows: int, num_points: int
) -> None:
    append(tmp_path / "run", *({"step": step, SCORE: float(step)} for step in range(num_rows)))
    curve = summary(read_run(tmp_path / "run"))["curve"]
    assert len(curve) == num_points and curve[-1] == num_rows - 1 and curve == sorted(curve)


def test_a_page_gets_the_points_that_it_lacks_and_the_last_one_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    append(run, *({"step": step, "a": step} for step in range(5)))
    runs = LiveRuns(tmp_path)
    first = runs.overview(run)
    assert (first["offset"], first["columns"]["step"], first["thinned"]) == (0, [0, 1, 2, 3, 4], 1)
    append(run, {"step": 4, "val": 9}, {"step": 5, "a": 5})
    more = runs.overview(run, after=5, epoch=first["epoch"])
    assert (more["offset"], more["columns"]["step"], more["columns"]["val"]) == (4, [4, 5], [9, None])
    assert more["epoch"] == first["epoch"]
    for after, epoch in ((5, first["epoch"] + 1), (7, first["epoch"]), (0, first["epoch"])):
        assert runs.overview(run, after=after, epoch=epoch)["offset"] == 0


def test_of_a_long_run_the_last_bucket_is_sent_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    append(run, *({"step": step, "a": step} for step in range(4000)))
    runs = LiveRuns(tmp_path)
    first = runs.overview(run)
    known = len(first["columns"]["step"])
    assert first["thinned"] == 4 and known == 1 + PER_BUCKET * 1000
    assert runs.overview(run, after=known, epoch=first["epoch"])["offset"] == known - PER_BUCKET


def test_only_folders_that_are_runs_are_found_by_name(tmp_path: Path) -> None:
    append(tmp_path / "run", {"step": 0})
    (tmp_path / "other").mkdir()
    append(tmp_path / "deep" / "inner", {"step": 0})
    runs = LiveRuns(tmp_path)
    assert runs.path("run") == tmp_path.resolve() / "run"
    assert [runs.path(name) for name in ("other", "inner", "deep", "..", "")] == [None] * 5


def test_files_are_read_again_only_when_they_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, reads = tmp_path / "run", []
    append(run, {"step": 0, "a": 1})

    def counted(path: Path, metrics: MetricTable | None = None) -> Run:
        reads.append(metrics is not None)  # whether rows that are known are kept
        return read_run(path, metrics)

    monkeypatch.setattr(live, "read_run", counted)
    runs = LiveRuns(tmp_path)
    tag = runs.tag(run)
    assert runs.tag(run) == tag and runs.run(run).last_step == 0 and len(runs.summaries()) == 1
    assert reads == [False]
    append(run, {"step": 1, "a": 2})
    assert runs.summaries()[0]["last_step"] == 1 and runs.run(run).last_step == 1 and runs.tag(run) != tag
    assert reads == [False, True]


def test_metrics_of_the_runs_used_longest_ago_are_dropped_and_their_summaries_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in "abc":
        append(tmp_path / name, *({"step": step, "x": step} for step in range(10)))
    monkeypatch.setattr(live, "MAX_CELLS", 25)
    runs = LiveRuns(tmp_path)
    for name in "abc":
        assert runs.run(tmp_path / name).last_step == 9
    runs.run(tmp_path / "a")  # b is now the one that was used longest ago
    held = {name: runs._runs[name].run is not None for name in "abc"}
    assert held == {"a": True, "b": False, "c": True}
    assert {entry["name"]: entry["last_step"] for entry in runs.summaries()} == dict.fromkeys("abc", 9)
    assert runs._runs["b"].run is None  # the list of runs needs no metrics
    assert runs.run(tmp_path / "b").values("x") == [float(step) for step in range(10)]


def test_a_run_that_is_dropped_while_it_is_read_is_still_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(tmp_path / "run", {"step": 3})
    runs = LiveRuns(tmp_path)
    status_of = live.status_of

    def dropping(*arguments: Any) -> str:
        runs._runs["run"].run = None  # as another request does that needs the memory
        return status_of(*arguments)

    monkeypatch.setattr(live, "status_of", dropping)
    assert runs.run(tmp_path / "run").last_step == 3


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(tmp_path / "good", {"step": 3})
    append(tmp_path / "bad", {"step": 4})

    def failing(path: Path, metrics: MetricTable | None = None) -> Run:
        if path.name == "bad":
            raise KeyError("odd")
        return read_run(path, metrics)

    monkeypatch.setattr(live, "read_run", failing)
    found = {entry["name"]: entry for entry in LiveRuns(tmp_path).summaries()}
    assert found["good"]["last_step"] == 3 and found["good"]["problems"] == []
    assert found["bad"]["problems"] == ["cannot be read (KeyError: 'odd')"]


def test_indexes_of_the_runs_used_last_stay_in_memory(tmp_path: Path) -> None:
    runs = LiveRuns(tmp_path)
    names = [f"run{number}" for number in range(live.MAX_INDEXES + 1)]
    first = [runs._index(tmp_path / name) for name in names[:-1]]
    assert runs._index(tmp_path / names[0]) is first[0]  # used again
    runs._index(tmp_path / names[-1])
    assert runs._index(tmp_path / names[0]) is first[0]
    assert runs._index(tmp_path / names[1]) is not first[1]


@pytest.mark.parametrize(
    ("sizes", "budget", "chosen"),
    [
        ([10, 10, 10, 10], 40, {1, 2, 3, 4}),
        ([10, 10, 10, 10], 39, {2, 4}),
        ([10, 10, 10, 10, 10], 20, {2, 5}),  # every third
        ([10, 10, 10, 10, 10], 29, {2, 5}),
        ([10, 10, 10, 10, 10], 30, {1, 3, 5}),
        ([10, 10], 5, {2}),  # the last one always
        ([10], 5, {1}),
        ([], 5, set()),
    ],
)
def test_texts_are_chosen_evenly_from_the_last_step_back(tmp_path: Path, sizes, budget, chosen) -> None:
    files = {}
    for step, size in enumerate(sizes, 1):
        files[step] = tmp_path / str(step)
        files[step].write_bytes(bytes(size))
    assert choose(files, budget) == chosen
