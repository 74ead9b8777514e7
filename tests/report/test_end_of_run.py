"""A run that ends well stays so when its report cannot be written, and the cause is told."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gspo.cli import app
from gspo.loop import ending
from gspo.loop.counters import Counters
from gspo.report import write
from gspo.runs.console import Console
from gspo.runs.folder import RunFolder
from tests.report.synthetic import Plan, make_run


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    return RunFolder(make_run(tmp_path / "run", Plan(steps=2, groups=2, n=2, questions=4, finished=False)))


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(write, "write_atomic", refuse)


def finish(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> tuple[dict[str, Any], str]:
    """The outcome of a run that ends now, and what it printed."""
    outcome = ending.finished(Console(), run, ending.result(run, 2, Counters()), num_examples=2)
    assert json.loads(run.result_file.read_text()) == outcome
    return outcome, " ".join(capsys.readouterr().out.split())


def test_a_full_disk_leaves_the_outcome_and_is_named(
    run: RunFolder, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    outcome, said = finish(run, capsys)
    assert f"report: {run.path}/report.html" in said and "warning" not in said
    (run.path / "report.html").unlink()
    request.getfixturevalue("full_disk")
    assert finish(run, capsys)[0] == outcome
    _, said = finish(run, capsys)
    assert "held-out accuracy" in said and "report: " not in said
    assert f"warning: the report of {run.path} is not complete: OSError" in said
    assert "No space left on device" in said and f"`gspo report {run.path}`" in said
    assert not (run.path / "report.html").exists()


def test_a_report_that_cannot_be_replaced_is_named(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    (run.path / "report.html").mkdir()
    outcome, said = finish(run, capsys)
    assert outcome["steps"] == 2 and "IsADirectoryError" in said and "report: " not in said


@pytest.mark.parametrize("folder", ["evals", "groups"])
def test_damaged_files_are_left_out(run: RunFolder, capsys: pytest.CaptureFixture[str], folder: str) -> None:
    whole, _ = finish(run, capsys)
    file = run.path / folder / "step-000002.jsonl.gz"
    file.write_bytes(file.read_bytes()[:30])
    outcome, said = finish(run, capsys)
    assert outcome == whole
    assert "report: " in said and "warning" not in said


def test_gspo_train_exits_with_success(tmp_path: Path, full_disk: None) -> None:
    settings = {
        "trainer.default_local_dir": tmp_path,
        "trainer.experiment_name": "short",
        "trainer.total_training_steps": 1,
        "trainer.num_threads": 1,
        "data.num_val_samples": 4,
        "data.max_response_length": 8,
        "data.train_batch_size": 2,
        "data.gen_batch_size": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.rollout.n": 4,
        "algorithm.filter_groups.enable": "false",
    }
    done = CliRunner().invoke(app, ["train", *(f"{key}={value}" for key, value in settings.items())])
    assert done.exit_code == 0, done.output
    last = done.stdout.strip().splitlines()[-1]
    assert json.loads(last.removeprefix("result: ")) == RunFolder(tmp_path / "short").result()
    assert "No space left on device" in done.output
