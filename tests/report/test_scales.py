"""Rewards of any scale are shown as what they are, and evaluation questions that are training rows are named."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gspo.build.data.training_data import count_seen
from gspo.cli import app
from gspo.report.live import summary
from gspo.report.overview import overview
from gspo.report.verdict import judge
from gspo.runs.group_index import FIELDS, index_step
from gspo.runs.run import read_run
from gspo.runs.stats import share_right
from gspo.types import Prompt
from tests.report.synthetic import Plan, make_run


def group(*scores: float, acc: float | None = None) -> dict:
    responses = [{"text": "x", "score": score, "acc": acc, "num_tokens": 3} for score in scores]
    return {"uid": "a", "fate": "kept", "messages": [], "responses": responses}


@pytest.mark.parametrize(
    ("scores", "acc", "share"),
    [
        ((0, 1, 1, 0), None, 0.5),
        ((-0.52, 0.1, 1.7, 0.0), None, None),  # a reward of another scale is not a share of right answers
        ((0.0, 0.5), None, None),
        ((2.5, -1.0), 0.5, 0.5),  # the accuracy says what is right, whatever the score is
        ((1.0,), 3.0, None),
        ((), None, None),
    ],
)
def test_only_answers_of_0_and_1_or_an_accuracy_give_a_share(scores, acc, share):
    record = group(*scores, acc=acc)
    assert share_right(record["responses"]) == share
    line = dict(zip(FIELDS, index_step([record])["groups"][0]))
    assert line["rate"] == share
    assert line["score"] == (pytest.approx(sum(scores) / len(scores), abs=1e-4) if scores else None)


def reward_run(folder: Path) -> Path:
    """A run whose reward is not between 0 and 1 and has no accuracy."""
    folder.mkdir()
    (folder / "evals").mkdir()
    name = "val-core/own/reward/mean@1"
    rows = [{"step": step, name: -2.0 + step, "critic/score_all/mean": -2.0 + step} for step in range(3)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for step in (0, 2):
        answers = [{**group(-2.0 + step + n), "uid": str(n)} for n in range(4)]
        with gzip.open(folder / "evals" / f"step-{step:06d}.jsonl.gz", "wt") as file:
            file.write("".join(json.dumps(answer) + "\n" for answer in answers))
    return folder


def test_a_reward_of_another_scale_has_a_headline_a_tile_and_samples(tmp_path):
    run = read_run(reward_run(tmp_path / "run"))
    verdict = judge(run)
    assert verdict.headline == "Held-out reward rose from -2.000 to 0.000"
    assert "points" not in " ".join(verdict.sentences) and "right" not in " ".join(verdict.sentences)
    page = overview(run)
    assert {
        "label": "Held-out reward",
        "value": "-2.000 → 0.000",
        "detail": "mean over the held-out questions",
    } in page["tiles"]
    assert [sample["scores"] for sample in page["samples"]] == [[-2.0, 0.0], [-1.0, 1.0], [0.0, 2.0]]
    listed = summary(run)
    assert listed["accuracy"] is None and listed["held_out_reward"] == (-2.0, 0.0)


def prompt(text: str, uid: str) -> Prompt:
    return Prompt(uid, ({"role": "user", "content": text},), (1, 2), "own", "3")


def test_training_rows_in_the_evaluation_are_found_by_their_text():
    train = [prompt(f"{n}+1=", f"train/{n}") for n in range(5)]
    held_out = [prompt("3+1=", "val/0"), prompt(" 4+1= ", "val/1"), prompt("9+1=", "val/2")]
    assert count_seen(train, held_out) == 2
    assert count_seen(train, held_out[2:]) == 0


@pytest.mark.parametrize(("seen", "said"), [(3, True), (0, False), (None, False)])
def test_the_report_says_when_evaluation_questions_were_trained_on(tmp_path, seen, said):
    path = make_run(tmp_path / "run", Plan(steps=4))
    environment = json.loads((path / "environment.json").read_text())
    if seen is not None:
        environment["held_out"] = {"questions": 40, "also_trained_on": seen}
        (path / "environment.json").write_text(json.dumps(environment))
    run = read_run(path)
    sentence = "3 of the 40 evaluation questions are also training rows"
    assert (sentence in " ".join(judge(run).sentences)) == said
    assert overview(run)["seen"] == (None if seen is None else (seen, 40))


def test_runs_with_long_names_can_be_told_apart_at_80_columns(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"qwen2.5-1.5b-instruct-gsm8k-learning-rate-sweep-{value}-seed-17" for value in ("1e-6", "3e-6")]
    runs = [make_run(tmp_path / name, Plan(lr=lr)) for name, lr in zip(names, (1e-6, 3e-6))]
    result = CliRunner().invoke(app, ["compare", *map(str, runs)])
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"A  {names[0]}" and lines[1] == f"B  {names[1]}"
    assert all(len(line) <= 80 for line in lines)
    table = [line for line in lines if line.startswith("│")]
    assert any(line.startswith("│A") for line in table) and any(line.startswith("│B") for line in table)
