"""Run folders from strangers: each is read within limits, and what is refused is named beside what is good."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gspo.cli import app
from gspo.report.live import LiveRuns
from gspo.report.write import build_report
from tests.faults.hostile_folders import GOOD, HOSTILE, make_hostile
from tests.report.synthetic import make_run

IN_GROUPS = ("groups/", "evals/")


@pytest.mark.parametrize("name", HOSTILE)
def test_the_report_names_what_it_left_out(tmp_path: Path, name: str) -> None:
    run, expected = make_hostile(tmp_path, name), HOSTILE[name][1]
    notes = [n for n in build_report(run, pictures=False).notes if n.startswith("not read: ")]
    assert any(n.startswith(f"not read: {expected}") for n in notes) if expected else not notes


def test_bad_folders_are_listed_by_name_beside_the_good_one(tmp_path: Path) -> None:
    alone = LiveRuns(make_run(tmp_path / "alone" / "good", GOOD).parent).summaries()[0]
    make_run(tmp_path / "runs" / "good", GOOD)
    for name in HOSTILE:
        make_hostile(tmp_path / "runs", name)
    listed = {run["name"]: run for run in LiveRuns(tmp_path / "runs").summaries()}
    assert listed.keys() == {"good", *HOSTILE}
    assert listed["good"] == alone and alone["problems"] == []
    for name, (_, expected) in HOSTILE.items():
        if expected and not expected.startswith(IN_GROUPS):
            assert any(p.startswith(expected) for p in listed[name]["problems"]), name


@pytest.mark.parametrize("name", HOSTILE)
def test_the_dashboard_answers_every_question_about_a_bad_folder(tmp_path: Path, name: str) -> None:
    make_hostile(tmp_path, name)
    live = LiveRuns(tmp_path)
    path, expected = tmp_path / name, HOSTILE[name][1]
    overview = live.overview(path)
    answer = live.index(path, 0, 0)
    while not answer["complete"]:
        answer = live.index(path, 0, 0)
    assert json.dumps([overview, answer])
    problems = [*overview["problems"], *(entry.get("problem", "") for entry in answer["entries"])]
    assert any(p and (p in expected or expected.split(": ")[-1] in p) for p in problems) if expected else True
    others = [e for e in answer["entries"] if (e["kind"], e["step"]) == ("train", 1)]
    assert len(others[0]["groups"]) == 2  # the file of another step is not affected


@pytest.mark.parametrize("name", ["deep_yaml", "recursive_alias", "alias_bomb", "config_pipe", "large_yaml"])
@pytest.mark.parametrize("command", [["train"], ["config"], ["replay"]])
def test_commands_refuse_a_hostile_config_by_name(tmp_path: Path, name: str, command: list[str]) -> None:
    run = make_hostile(tmp_path, name)
    target = run if command == ["replay"] else run / "config.yaml"
    words = [*command, str(target)] if command != ["config"] else ["config", "show", str(target)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2, done.output
    assert str(run / "config.yaml") in done.output and HOSTILE[name][1].split(": ")[1] in done.output


def test_compare_names_the_problems_of_a_run(tmp_path: Path) -> None:
    good, bad = make_run(tmp_path / "good", GOOD), make_hostile(tmp_path, "alias_bomb")
    done = CliRunner().invoke(app, ["compare", str(good), str(bad)])
    assert done.exit_code == 0
    assert "alias_bomb: not read: config.yaml: has more than 20,000 values" in " ".join(done.output.split())
