"""`gspo report`, `gspo compare`, `gspo dashboard` as a user calls them."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gspo.cli import app
from gspo.report.comparison import compare_runs, config_differences
from gspo.runs.run import read_run
from tests.report.synthetic import Plan, make_run

cli = CliRunner()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("three")
    plans = {
        "a": Plan(steps=4, groups=2),
        "b": Plan(steps=4, groups=2, gain=0.68, lr=3e-4, seed=1),
        "c": Plan(steps=4, groups=2),
    }
    return [make_run(folder / name, plan) for name, plan in plans.items()]


def test_compare_pairs_the_same_questions(three: list[Path]) -> None:
    done = cli.invoke(app, ["compare", *map(str, three), "--json"])
    assert done.exit_code == 0, done.output
    answer = json.loads(done.stdout)
    to_b, to_c = answer["differences"]
    a, b = (read_run(p) for p in three[:2])
    assert to_b["paired"]["difference"] == pytest.approx(b.accuracy[-1][1] - a.accuracy[-1][1])
    assert (to_b["paired"]["num_questions"], to_b["paired"]["num_worse"], to_b["paired"]["clear"]) == (40, 0, True)
    assert (to_c["paired"]["difference"], to_c["paired"]["clear"]) == (0.0, False)
    assert {c["key"] for c in answer["config"]} == {"actor_rollout_ref.actor.optim.lr", "trainer.seed"}
    assert answer["config"][0]["values"][1] == {"value": 3e-4, "missing": False}
    curves = answer["runs"][0]["curves"]
    assert curves["step"] == [0, 1, 2, 3, 4]
    assert curves["tokens"] == [192 * i for i in range(5)]
    assert curves["seconds"] == pytest.approx([1.6 * i for i in range(5)])
    assert curves["accuracy"][0] == a.accuracy[0][1] and curves["accuracy"][1] is None


def test_compare_in_words_and_as_a_page(three: list[Path], tmp_path: Path) -> None:
    page = tmp_path / "compare.html"
    done = cli.invoke(app, ["compare", *map(str, three), "--html", str(page)])
    assert done.exit_code == 0, done.output
    text = " ".join(done.stdout.split())
    assert re.search(r"b is better than a by [\d.]+ points over the same 40 held-out questions", text)
    assert "No clear difference between c and a: +0.0 points" in text
    assert page.read_text().count('id="data-overview-') == 3


def test_compare_without_common_questions_says_so(three: list[Path], tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": 1}\n')
    answer = compare_runs([read_run(three[0]), read_run(tmp_path)])
    assert answer["differences"][0]["paired"] is None
    assert "share no held-out question" in answer["sentences"][0]
    missing = {
        c["key"]: c["values"][1]["missing"] for c in config_differences([read_run(three[0]), read_run(tmp_path)])
    }
    assert missing["data.train_files"] is True


def test_report_command(three: list[Path]) -> None:
    done = cli.invoke(app, ["report", str(three[0]), "--no-pictures"])
    assert done.exit_code == 0, done.output
    assert str(three[0] / "report.html") in done.stdout and "Held-out accuracy" in done.stdout
    answer = json.loads(cli.invoke(app, ["report", str(three[0]), "--no-pictures", "--json"]).stdout)
    assert answer["files"]["page"] == str(three[0] / "report.html")


@pytest.mark.parametrize("arguments", [["report", "nowhere"], ["compare", "nowhere", "x"], ["dashboard", "nowhere"]])
def test_a_wrong_folder_is_named(arguments: list[str]) -> None:
    done = cli.invoke(app, arguments)
    assert done.exit_code == 2
    assert "nowhere" in done.stderr and "error:" in done.stderr


def test_one_run_cannot_be_compared(three: list[Path]) -> None:
    done = cli.invoke(app, ["compare", str(three[0])])
    assert done.exit_code == 2 and "two or more" in done.stderr


def test_dashboard_command_serves_and_stops(three: list[Path]) -> None:
    command = [sys.executable, "-u", "-m", "gspo", "dashboard", str(three[0].parent), "--port", "0"]
    # A background shell leaves SIGINT ignored, and children inherit that.
    options = {"text": True, "preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options) as process:
        assert process.stdout and process.stderr
        line = process.stdout.readline()
        url = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert url, line
        with urllib.request.urlopen(url.group() + "api/runs", timeout=20) as answer:
            assert {r["name"] for r in json.load(answer)["runs"]} == {"a", "b", "c"}
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) == 0
        assert process.stderr.read() == ""
