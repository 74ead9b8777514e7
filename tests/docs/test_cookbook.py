"""The cookbook: every command of the page runs, in its order, in one folder, on the embedded model at a smaller size."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gspo.cli import app
from tests.support.preloaded import preloaded_python

PAGE = Path(__file__).parents[2] / "docs" / "cookbook.md"
ROOT = Path(__file__).parents[2]
SMALLER = {  # of training commands, by their first words
    "gspo sft": ["--steps", "2", "--batch-size", "4", "trainer.num_threads=1", "data.num_val_samples=8"],
    "gspo train": ["trainer.num_threads=1"],
    "gspo branch": ["trainer.num_threads=1"],
    "gspo eval": ["trainer.num_threads=1", "--limit", "8"],
    "gspo doctor mine.yaml": ["trainer.num_threads=1"],
}
SIZES = (
    ("total_training_steps: 10", "total_training_steps: 1"),
    ("train_batch_size: 16", "train_batch_size: 4"),
    ("max_response_length: 48", "max_response_length: 12"),
)
STEPS = (("total_training_steps=12", "total_training_steps=2"), ("mine@10", "mine@1"))
NOT_RUN = ("pip install",)  # it needs a network


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)


def commands() -> list[str]:
    return [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines() if line]


def small(command: str) -> str:
    for long, short in STEPS:
        command = command.replace(long, short)
    extra = next((words for start, words in SMALLER.items() if command.startswith(start)), [])
    return command if "--dry-run" in command else f"{command} {shlex.join(extra)}".rstrip()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the page says to write."""
    where = tmp_path_factory.mktemp("cookbook")
    make_data, my_reward = blocks("python")
    (mine,) = blocks("yaml")
    for long, short in SIZES:
        assert long in mine
        mine = mine.replace(long, short)
    mine += "actor_rollout_ref.actor.ppo_mini_batch_size: 2\nactor_rollout_ref.rollout.n: 4\ndata.num_val_samples: 8\n"
    for name, text in (("make_data.py", make_data), ("my_reward.py", my_reward), ("mine.yaml", mine)):
        (where / name).write_text(text)
    return where


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    source = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    return os.environ | {"PATH": path, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"}


def run(command: str, folder: Path) -> str:
    """What a command prints. Those of gspo run in this process, which saves the imports of a new one."""
    typed, _, piped = command.rpartition(" | ")
    if piped.startswith("gspo "):
        done = CliRunner().invoke(app, shlex.split(piped)[1:], input=typed.removeprefix("echo ").strip('"') + "\n")
        assert done.exit_code == 0, f"{command}\n{done.output[-3000:]}\n{done.exception!r}"
        return done.output
    shell = subprocess.run(["bash", "-c", command], cwd=folder, env=environment(), capture_output=True, text=True)
    assert shell.returncode == 0, f"{command}\n{shell.stdout}\n{shell.stderr}"
    return shell.stdout


@contextmanager
def server(command: str, folder: Path) -> Iterator[str]:
    """A command that serves until it is stopped, on a free port. Yields its address."""
    words = shlex.split(re.sub(r"--port \d+", "--port 0", command))
    child = subprocess.Popen(
        [preloaded_python(), "-m", *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert child.stdout is not None
        seen = []
        for line in child.stdout:
            seen.append(line)
            if found := re.search(r"http://127\.0\.0\.1:\d+", line):
                yield found[0]
                break
        else:
            raise AssertionError("".join(seen))
    finally:
        child.send_signal(signal.SIGINT)
        try:
            child.wait(timeout=30)
        except subprocess.TimeoutExpired:
            child.kill()


def test_the_whole_path_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    said: dict[str, str] = {}
    for command in commands():
        if command.startswith(NOT_RUN):
            continue
        short = small(command)
        if "dashboard" in command:
            with server(short, folder) as address:
                assert b"<html" in urllib.request.urlopen(address, timeout=30).read()
        elif command.startswith("gspo serve"):
            said["serve"] = short
        elif command.startswith("curl"):
            with server(said["serve"], folder) as address:
                said[command] = run(short.replace("http://127.0.0.1:8000", address), folder)
        else:
            said[command] = run(short.replace("python ", f"{shlex.quote(preloaded_python())} ", 1), folder)
    show = said["gspo data show questions.csv --n 1"]
    assert "the question is column 'question', the correct answer is column 'final_answer'" in show
    assert "600 rows" in show and "result: " in said["gspo train mine.yaml"]
    runs = folder / "runs"
    assert json.loads((runs / "mine" / "result.json").read_text())["steps"] == 2  # it was made longer
    assert (runs / "slower" / "result.json").is_file() and (folder / "warm" / "model.safetensors").is_file()
    assert (folder / "compare.html").is_file() and (runs / "mine" / "report.html").is_file()
    card = (folder / "shared" / "README.md").read_text()
    assert card in said["gspo push runs/mine my-name/my-model --dry-run"]
    assert (folder / "shared" / "model.safetensors").is_file()
    (answer,) = [json.loads(text) for command, text in said.items() if command.startswith("curl")]
    text = answer["choices"][0]["message"]["content"]
    assert text in said[next(command for command in said if "gspo chat" in command)]  # greedy both times


def test_every_stage_has_a_command() -> None:
    text = "\n".join(commands())
    for word in (
        "data show",
        "rewards try",
        "sft",
        "train",
        "doctor",
        "dashboard",
        "branch",
        "eval",
        "compare",
        "serve",
    ):
        assert f"gspo {word}" in text
