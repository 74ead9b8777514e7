"""The tutorial "your own data and reward": its files and commands work as they are written, at a smaller size."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gspo.cli import app

PAGE = Path(__file__).parents[2] / "docs" / "own-data-and-reward.md"
SMALL = [
    "trainer.total_training_steps=1",
    "trainer.num_threads=1",
    "data.num_val_samples=4",
    "data.train_batch_size=4",
    "data.max_response_length=24",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
]


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder with the files that the page tells to write."""
    monkeypatch.chdir(tmp_path)
    make_data, my_reward, *_ = blocks("python")
    for name, text in (("make_data.py", make_data), ("my_reward.py", my_reward), ("mine.yaml", blocks("yaml")[0])):
        (tmp_path / name).write_text(text)
    runpy.run_path("make_data.py")
    return tmp_path


def gspo(words: str) -> str:
    done = CliRunner().invoke(app, words.split())
    assert done.exit_code == 0, done.output
    return done.output


def console(number: int) -> tuple[str, str]:
    """The last command of a console block of the page, and what it printed."""
    text = blocks("console")[number]
    command, _, printed = text.rpartition("$ gspo ")[2].partition("\n")
    return command, printed


def test_the_data_is_shown_as_on_the_page(folder):
    assert (folder / "train.jsonl").read_text().splitlines()[0] == blocks("json")[0].strip()
    command, printed = console(0)
    assert gspo(command) == printed


def test_the_reward_is_tried_as_on_the_page(folder):
    (folder / "answer.txt").write_text("50+98=148;148+54=202;202\n")
    command, printed = console(1)
    shown = gspo(command)
    assert shown.splitlines()[:-1] == printed.splitlines()[:-1]  # all but the time


def test_the_config_trains(folder):
    gspo(f"train mine.yaml {' '.join(SMALL)}")
    assert (folder / "runs" / "mine" / "result.json").is_file()
    assert '"reward/steps/mean"' in (folder / "runs" / "mine" / "metrics.jsonl").read_text()
