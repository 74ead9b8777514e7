"""The page "Extend gspo": its files and commands work as they are written, at a smaller size."""

from __future__ import annotations

import csv
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from gspo.runs.run import read_run
from tests.support.preloaded import preloaded_python

PAGE = (Path(__file__).parents[2] / "docs" / "extend.md").read_text(encoding="utf-8")
FILES = dict(re.findall(r'```python title="([^"]+)"\n(.*?)```', PAGE, re.DOTALL))
COMMANDS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
SMALL = [
    "trainer.num_threads=1",
    "data.num_val_samples=4",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
]


@pytest.fixture
def folder(tmp_path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def run(folder: Path, words: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [preloaded_python(), *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def gspo(folder: Path, command: str) -> str:
    words = shlex.split(command.replace("\\\n", " "))
    assert words[0] == "gspo"
    return run(folder, ["-m", "gspo", *words[1:], *SMALL])


def test_every_part_of_the_table_has_an_example():
    decorators = re.findall(r"^\| [^|]+ \| `@(gspo\.\w+)\(", PAGE, re.MULTILINE)
    assert len(decorators) == 9
    for decorator in decorators:
        assert any(f"@{decorator}(" in text for text in FILES.values()), decorator


def test_parts_from_plugin_files_train_together(folder):
    printed = gspo(folder, COMMANDS[0])
    result = json.loads(printed.rpartition("result: ")[2])
    assert result["steps"] == 2
    run_folder = folder / result["run"]
    rows = read_run(run_folder).rows
    assert "on fours, spo, median advantages" in printed
    assert all(row["train/groups_filtered"] + row["train/groups_kept"] > 0 for row in rows[1:])
    assert {"reward/reward/arithmetic/mean", "reward/reward/brief/mean"} <= set(rows[1])
    sink = list(csv.reader((run_folder / "rewards.csv").open()))
    assert [line[1] for line in sink[1:]] == [str(row["critic/score/mean"]) for row in rows[1:]]
    state = json.loads((run_folder / "checkpoints" / "step-000002" / "training" / "state.json").read_text())
    assert state["callbacks"] == {"StopWhenGood": {"good_steps": 0}}


def test_an_engine_from_a_plugin_file_generates_what_is_trained_on(folder):
    printed = gspo(folder, COMMANDS[1])
    result = json.loads(printed.rpartition("result: ")[2])
    rows = read_run(folder / result["run"]).rows
    # The engine's log-probs and the trainer's come from two programs over the same weights.
    assert abs(rows[1]["actor/rollout_kl"]) < 1e-4


def test_objects_are_passed_from_python(folder):
    text = FILES["train.py"].replace("overrides=[", f"overrides=[{', '.join(map(repr, SMALL))}, ")
    (folder / "train.py").write_text(text)
    printed = run(folder, ["train.py"])
    assert "3 rows" in printed
    assert "'steps': 2" in printed


def test_an_environment_answers_turns(folder):
    gspo(folder, COMMANDS[2])
    (run_folder,) = (folder / "runs").iterdir()
    last = json.loads((run_folder / "metrics.jsonl").read_text().splitlines()[-1])
    assert 1 <= last["num_turns/mean"] <= 2 and last["environment/failures"] == 0
