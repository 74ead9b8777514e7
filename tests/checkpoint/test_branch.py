"""`gspo branch`: a new run from a checkpoint, with other settings and a recorded ancestry."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gspo.cli import app
from gspo.loop.trainer import Trainer
from gspo.report.verdict import judge
from gspo.runs.console import Console
from gspo.runs.run import read_run
from tests.support.small_run import config, even_first_byte, final_state, make_model

REWARD = "def score(prompt, response):\n    return float(bool(response) and ord(response[0]) % 2 == 0)\n"
LR = "actor_rollout_ref.actor.optim.lr"


@pytest.fixture(scope="module")
def parent(tmp_path_factory) -> Path:
    """A finished run of four steps, started as a command would, with all its checkpoints."""
    folder = tmp_path_factory.mktemp("parent")
    model = make_model(folder / "model")
    (folder / "mine.py").write_text(REWARD)
    reward = [f"custom_reward_function.path={folder / 'mine.py'}", "custom_reward_function.name=score"]
    keep = "trainer.max_actor_ckpt_to_keep=null"
    Trainer(config(folder / "runs", model, *reward, keep), console=Console(enabled=False)).fit()
    return folder / "runs" / "run"


def branch(*words: str):
    return CliRunner().invoke(app, ["branch", *words])


def rows(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def without_times(row: dict) -> dict:
    return {key: value for key, value in row.items() if not key.startswith(("timing_s/", "perf/"))}


def test_a_branch_without_changes_computes_what_its_parent_did(parent):
    result = branch(f"{parent}@2", "same")
    assert result.exit_code == 0, result.output
    new = parent.parent / "same"
    assert [without_times(r) for r in rows(new)] == [without_times(r) for r in rows(parent)]
    weights = [p / "checkpoints" / "step-000004" / "model.safetensors" for p in (parent, new)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_branch_with_another_rate_begins_where_its_parent_was_and_says_so(parent):
    before = final_state(parent)
    result = branch(f"{parent}@2", "slower", f"{LR}=1e-4", "trainer.total_training_steps=5")
    assert result.exit_code == 0, result.output
    assert f"a branch of {parent} at step 2" in result.stdout and f"{LR}: 0.001 → 0.0001" in result.stdout
    new = parent.parent / "slower"
    assert [r["step"] for r in rows(new)] == [0, 1, 2, 3, 4, 5]
    assert [without_times(r) for r in rows(new)[:3]] == [without_times(r) for r in rows(parent)[:3]]
    assert rows(new)[3]["actor/lr"] == 1e-4
    ancestry = json.loads((new / "ancestry.json").read_text())
    assert ancestry["run"] == str(parent) and ancestry["step"] == 2
    assert {"key": LR, "from": 0.001, "to": 0.0001} in ancestry["changed"]
    assert "a branch of" in " ".join(judge(read_run(new)).sentences)
    assert final_state(parent) == before


def test_a_branch_with_other_data_starts_sampling_anew_and_a_branch_of_a_branch_keeps_its_ancestors(parent):
    result = branch(f"{parent}@2", "other", "data.num_train_samples=32", "--no-train")
    assert result.exit_code == 0 and "the order of the data starts anew" in result.stdout
    result = branch(str(parent.parent / "other"), "third", "trainer.total_training_steps=3")
    assert result.exit_code == 0, result.output
    ancestry = json.loads((parent.parent / "third" / "ancestry.json").read_text())
    assert ancestry["parent"]["run"] == str(parent) and ancestry["step"] == 2
    assert rows(parent.parent / "third")[-1]["step"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["@9", "new"], "no checkpoint of step 9; it has those of 1, 2, 3, 4"),
        (["@last", "new"], "expected a step after @"),
        (["", "run"], "exists; give the new run another name"),
        (["", "new", "actor_rollout_ref.rollout.n=0"], "actor_rollout_ref.rollout.n"),
    ],
)
def test_what_cannot_be_branched_is_refused(parent, words, message):
    result = branch(f"{parent}{words[0]}", *words[1:])
    assert result.exit_code == 2 and message in result.output
    assert not (parent.parent / "new").exists()


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    result = branch(str(tmp_path), "new")
    assert result.exit_code == 2 and "is not a run folder" in result.output


def test_the_hint_after_a_stop_is_true_for_a_python_program(tmp_path, capsys):
    model = make_model(tmp_path / "model")

    def trainer(*overrides: str) -> Trainer:
        return Trainer(config(tmp_path, model, *overrides), even_first_byte)

    first = trainer()
    step = first.train_step
    first.train_step = lambda: (step(), setattr(first.stop, "signal", 15))
    first.fit()
    said = capsys.readouterr().out
    assert "gspo train" not in said and "running the same Python program again" in said
    hint = said.strip().splitlines()[-1].strip()
    assert hint == f"trainer.resume_mode={tmp_path / 'run'}"
    assert trainer("trainer.experiment_name=null", hint).fit()["steps"] == 4
