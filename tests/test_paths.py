"""Paths of a user's home folder, and of the home of somebody who is not there."""

from __future__ import annotations

from pathlib import Path

import pytest

import gspo
from gspo.checkpoint.resume import find_resume
from gspo.config import ConfigErrors, load
from gspo.paths import user_path
from gspo.registry import import_file
from tests.support import small_checkpoint

STRANGER = "~nobody-of-this-name/x"


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("kind", [str, Path])
def test_a_home_folder_is_found_and_an_unknown_one_is_left_as_it_is_written(home, kind):
    assert user_path(kind("~/runs")) == home / "runs" and user_path(kind("~")) == home
    for path in (STRANGER, "a/~/b", "/x", ""):
        assert user_path(kind(path)) == Path(path)


def test_no_other_module_expands_a_path_by_itself():
    source = Path(gspo.__file__).parent
    found = [path.name for path in source.rglob("*.py") if "expanduser" in path.read_text(encoding="utf-8")]
    assert found == ["paths.py"]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("data.train_files={}.jsonl", "no such file"),
        ("data.val_files={}.csv", "no such file"),
        ("actor_rollout_ref.model.path={}", "no such folder"),
        ("custom_reward_function.path={}.py", "no such file"),
        ("trainer.resume_mode={}", "expected auto, disable or the path of a checkpoint"),
    ],
)
def test_a_key_with_the_home_of_an_unknown_user_is_refused_by_name(key, said):
    setting = key.format(STRANGER)
    with pytest.raises(ConfigErrors) as caught:
        load(None, [setting])
    name, _, value = setting.partition("=")
    assert all(part in str(caught.value) for part in (name, value, said))


def test_a_plugin_in_the_home_folder_is_imported_and_one_of_a_stranger_is_not_there(home):
    (home / "mine.py").write_text("NUMBER = 3\n")
    assert import_file("~/mine.py").NUMBER == 3
    with pytest.raises(FileNotFoundError, match="nobody-of-this-name"):
        import_file(STRANGER)


def test_runs_in_the_home_folder_are_written_and_resumed_there(home):
    settings = ["trainer.default_local_dir=~/my runs", "trainer.experiment_name=run"]
    resolved = load(None, settings)
    run = home / "my runs" / "run"
    assert find_resume(resolved).run.path == run
    small_checkpoint.save(run / "checkpoints", 2, values=small_checkpoint.STATE | {"config": resolved.to_dict()})
    resumed = find_resume(load(None, ["trainer.resume_mode=~/my runs/run", "trainer.experiment_name=null"]))
    assert resumed.run.path == run and resumed.checkpoint is not None and resumed.checkpoint.step == 2
    other = find_resume(load(None, [settings[0], "trainer.resume_mode=~/my runs/run", "trainer.experiment_name=new"]))
    assert other.run.path == home / "my runs" / "new" and other.checkpoint is not None
