"""The folder of a branch: what is copied, what is new in its state, and that the parent's files stay as they are."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
from pathlib import Path

import pytest

from gspo.build.fingerprint import TRAINED_ON
from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.branch import find_checkpoint, make_branch
from gspo.checkpoint.contents import CheckpointError
from gspo.commands import branch as commands_branch
from gspo.config import ResolvedConfig, load
from gspo.loop.preferences import RewardModelTrainer
from gspo.loop.supervised import SupervisedTrainer
from gspo.loop.trainer import Trainer
from gspo.runs.files import write_json
from gspo.runs.folder import RunFolder
from tests.support import small_checkpoint

BASE = ("trainer.experiment_name=run", "trainer.default_local_dir=runs")
FACTS = {"model shape": "a", "training data": "b", "steps of the learning-rate schedule": 9}


def settings(*overrides: str) -> ResolvedConfig:
    return load(None, [*BASE, *overrides])


def make_parent(folder: Path, *steps: int, supervised: bool = False) -> RunFolder:
    """A run folder with rows and evaluations of the steps 0 to 4, and checkpoints of some."""
    run = RunFolder(folder / "run").open()
    run.close()
    for step in range(5):
        run.append_metrics(step, {"x": float(step)})
        with gzip.open(run.evals / f"step-{step:06d}.jsonl.gz", "wt") as file:
            file.write(f'{{"step": {step}}}\n')
    (run.evals / "notes.txt").touch()
    run.write_environment({"host": "here"})
    own = {"examples": {"at": 3}} if supervised else {"sampler": {"version": 2, "prompts": [1]}, "objective": {}}
    state = {"config": settings().to_dict(), "fingerprint": FACTS, "counters": {"seconds": 4.5}, **own}
    for step in steps:
        small_checkpoint.save(run.checkpoints, step, values=state)
    return run


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> RunFolder:
    return make_parent(tmp_path_factory.mktemp("finished"), 4)


def contents(folder: Path) -> dict[str, str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_the_new_folder_holds_everything_up_to_its_step_and_the_parent_stays_as_it_was(tmp_path):
    parent = make_parent(tmp_path, 2, 3)
    before = contents(parent.path)
    resolved = settings("actor_rollout_ref.actor.optim.lr=0.5")
    branch = make_branch(parent, find_checkpoint(parent, 2), tmp_path / "new", resolved)
    assert contents(parent.path) == before, "files of both runs may be one on disk"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "run"]
    assert (branch.run.path, branch.step, branch.samples_anew) == (tmp_path / "new", 2, False)
    assert branch.changed["actor_rollout_ref.actor.optim.lr"][1] == 0.5
    new = branch.run
    assert [row["step"] for row in new.rows()] == [0, 1, 2]
    assert sorted(path.name for path in new.evals.iterdir()) == [f"step-{step:06d}.jsonl.gz" for step in range(3)]
    assert json.loads(new.environment_file.read_text()) == {"host": "here"}
    assert new.config_file.read_text() == resolved.to_yaml(with_origins=True)
    assert json.loads(new.settings_file.read_text()) == json.loads(json.dumps(resolved.records()))
    assert [path.name for path in new.checkpoints.iterdir()] == ["step-000002"]
    loaded = checkpoint.load(new.checkpoints / "step-000002")
    old = checkpoint.load(parent.checkpoints / "step-000002").state
    assert loaded.state["config"] == json.loads(json.dumps(resolved.to_dict()))
    assert loaded.state["fingerprint"] == {"model shape": "a"}, "facts that a branch may change are not compared"
    assert {name: value for name, value in loaded.state.items() if name not in ("config", "fingerprint")} == {
        name: value for name, value in old.items() if name not in ("config", "fingerprint")
    }
    assert float(loaded.tensors["optimizer"]["step/w"]) == 2


@pytest.mark.parametrize(
    ("override", "anew"),
    [
        ("data.shuffle=false", True),
        ("algorithm.filter_groups.enable=false", True),
        ("actor_rollout_ref.rollout.temperature=0.5", True),
        ("reward.format_weight=0.5", True),
        ("reward_model.weight=0.25", True),
        ("custom_reward_function.name=other", True),
        ("environment.timeout=77", True),
        ("trainer.seed=5", True),
        ("actor_rollout_ref.actor.optim.lr=0.5", False),
        ("algorithm.gamma=0.5", False),
        ("trainer.total_training_steps=99", False),
        ("trainer.experiment_name=other", False),
    ],
)
def test_sampling_starts_anew_where_its_state_loses_its_meaning(tmp_path, finished, override, anew):
    branch = make_branch(finished, find_checkpoint(finished, None), tmp_path / "new", settings(override))
    key, _, _ = override.partition("=")
    assert (key in branch.changed) == (key != "trainer.experiment_name")
    assert branch.samples_anew is anew
    sampler = find_checkpoint(branch.run, 4).state["sampler"]
    assert sampler == ({"version": 4} if anew else {"version": 2, "prompts": [1]})


def test_a_supervised_run_keeps_its_place_in_the_examples(tmp_path):
    parent = make_parent(tmp_path, 4, supervised=True)
    branch = make_branch(parent, find_checkpoint(parent, 4), tmp_path / "new", settings("data.shuffle=false"))
    state = find_checkpoint(branch.run, None).state
    assert not branch.samples_anew and state["examples"] == {"at": 3} and "sampler" not in state


def test_names_of_the_run_are_no_differences_and_the_rest_is_recorded_with_the_ancestors(tmp_path):
    parent = make_parent(tmp_path, 2)
    write_json(parent.path / "ancestry.json", {"run": "first", "step": 1, "changed": []})
    words = ("trainer.experiment_name=x", "trainer.default_local_dir=y", "trainer.resume_mode=disable")
    same = make_branch(parent, find_checkpoint(parent, 2), tmp_path / "same", settings(*words))
    assert same.changed == {}
    other = settings("trainer.seed=7", "trainer.project_name=p")
    make_branch(parent, find_checkpoint(parent, 2), tmp_path / "other", other)
    ancestry = json.loads((tmp_path / "other" / "ancestry.json").read_text())
    assert (ancestry["run"], ancestry["step"]) == (str(parent.path), 2)
    assert {"key": "trainer.seed", "from": settings().config.trainer.seed, "to": 7} in ancestry["changed"]
    assert ancestry["parent"] == {"run": "first", "step": 1, "changed": []}
    (parent.path / "ancestry.json").unlink()
    make_branch(parent, find_checkpoint(parent, 2), tmp_path / "third", other)
    assert "parent" not in json.loads((tmp_path / "third" / "ancestry.json").read_text())


def test_a_branch_is_complete_or_not_there(tmp_path, monkeypatch):
    parent = make_parent(tmp_path, 2)
    loaded = find_checkpoint(parent, 2)
    (tmp_path / ".tmp-new" / "rest").mkdir(parents=True)  # of a branch that was interrupted

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("gspo.checkpoint.branch.write_json", full)
        with pytest.raises(CheckpointError, match=r"new: could not write the branch: .*No space left"):
            make_branch(parent, loaded, tmp_path / "new", settings())
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / ".tmp-new" / "rest").mkdir(parents=True)
    parent.environment_file.unlink()
    new = make_branch(parent, loaded, tmp_path / "new", settings()).run
    assert not (new.path / "rest").exists() and not new.environment_file.exists()
    with pytest.raises(CheckpointError, match="new: exists; give the new run another name"):
        make_branch(parent, loaded, tmp_path / "new", settings())


def test_a_disk_without_links_gets_copies(tmp_path, monkeypatch):
    parent = make_parent(tmp_path, 2)
    linked = make_branch(parent, find_checkpoint(parent, 2), tmp_path / "linked", settings()).run

    def refuse(*_):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    copied = make_branch(parent, find_checkpoint(parent, 2), tmp_path / "copied", settings()).run
    names = ("checkpoints/step-000002/model.safetensors", "evals/step-000001.jsonl.gz")
    for name in names:
        assert (linked.path / name).samefile(parent.path / name)
        assert not (copied.path / name).samefile(parent.path / name)
        assert (copied.path / name).read_bytes() == (parent.path / name).read_bytes()


def test_the_checkpoint_of_a_branch_is_the_newest_intact_one_or_the_one_that_is_named(tmp_path):
    parent = make_parent(tmp_path, 1, 2, 3)
    assert find_checkpoint(parent, None).step == 3 and find_checkpoint(parent, 1).step == 1
    with pytest.raises(CheckpointError, match="has no checkpoint of step 0; it has those of 1, 2, 3 "):
        find_checkpoint(parent, 0)
    (parent.checkpoints / "step-000003" / "config.json").write_text("{}")
    assert find_checkpoint(parent, None).step == 2
    with pytest.raises(CheckpointError, match=r"step-000003: config\.json has 2 bytes"):
        find_checkpoint(parent, 3)
    with pytest.raises(CheckpointError, match="has no checkpoint of step 4; it has those of 1, 2, 3 "):
        find_checkpoint(parent, 4)
    for step in (1, 2):
        (parent.checkpoints / f"step-{step:06d}" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-000003: config\.json has 2 bytes"):
        find_checkpoint(parent, None)
    with pytest.raises(CheckpointError, match="has no checkpoint to branch from"):
        find_checkpoint(RunFolder(tmp_path / "empty"), None)


@pytest.mark.parametrize(
    ("trained_on", "trainer"), [("rollouts", Trainer), ("answers", SupervisedTrainer), ("pairs", RewardModelTrainer)]
)
def test_a_branch_is_trained_as_its_parent_was(monkeypatch, trained_on, trainer):
    monkeypatch.setattr("gspo.loop.run.run_program", lambda resolved, kind: (resolved, kind))
    assert commands_branch._train("config", {TRAINED_ON: trained_on}) == ("config", trainer)
    assert commands_branch._train("config", {}) == ("config", Trainer)
