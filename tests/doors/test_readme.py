"""The Python example of the README runs as it is written, at a smaller size."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
SMALLER = [
    "trainer.total_training_steps=1",
    "trainer.num_threads=1",
    "data.train_batch_size=4",
    "data.max_response_length=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=4",
    "algorithm.filter_groups.on_limit=keep_unfiltered",
    "algorithm.filter_groups.max_num_gen_batches=2",
]


def example() -> str:
    (found,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    return found


def run_in(folder, monkeypatch, code: str) -> Path:
    """Run the code there; returns the folder of its run."""
    monkeypatch.chdir(folder)
    exec(compile(code, str(README), "exec"), {"__name__": "example"})
    (result,) = (folder / "runs").glob("*/result.json")
    return result.parent


@pytest.mark.slow
def test_the_python_example_learns_on_rows_that_it_does_not_train_on(tmp_path, monkeypatch):
    run = run_in(tmp_path, monkeypatch, example())
    facts = json.loads((run / "result.json").read_text())
    assert facts["final_ci"][0] > facts["start_ci"][1]
    assert json.loads((run / "environment.json").read_text())["held_out"] == {"questions": 128, "also_trained_on": 0}


def test_the_python_example_trains(tmp_path, monkeypatch):
    small = example().replace("rows[:128]", "rows[:8]")
    small, found = re.subn(r"overrides=\[(.*?)\]", rf"overrides=[\1 *{SMALLER!r}]", small, flags=re.DOTALL)
    assert found == 1
    run = run_in(tmp_path, monkeypatch, small)
    facts = json.loads((run / "result.json").read_text())
    assert json.loads((run / "environment.json").read_text())["held_out"]["also_trained_on"] == 0
    assert facts["steps"] == 1 and facts["final_acc"] is not None
