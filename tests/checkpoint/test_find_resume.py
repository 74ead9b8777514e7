"""Which folder and checkpoint a run starts from, by its keys and by what lies on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.resume import Resume, ResumeRefused, base_name, find_resume, flatten
from gspo.config import ResolvedConfig, TrainerConfig, load
from gspo.runs.files import write_json
from gspo.runs.folder import RunFolder, RunLocked
from tests.support import small_checkpoint

NAMED = "trainer.experiment_name=run"
UNNAMED = "trainer.experiment_name=null"


def settings(folder: Path, *overrides: str) -> ResolvedConfig:
    return load(None, [f"trainer.default_local_dir={folder}", "actor_rollout_ref.model.path=m/tiny", *overrides])


def save(folder: Path, resolved: ResolvedConfig, *steps: int) -> None:
    for step in steps:
        values = small_checkpoint.STATE | {"config": resolved.to_dict()}
        small_checkpoint.save(folder / "checkpoints", step, values=values)


def damage(folder: Path, step: int) -> None:
    (folder / "checkpoints" / f"step-{step:06d}" / "config.json").write_text("{}")


def found(resume: Resume) -> tuple[Path, int | None, bool]:
    return resume.run.path, resume.checkpoint and resume.checkpoint.step, resume.chosen


def test_a_named_run_starts_from_its_newest_intact_checkpoint_and_names_the_others(tmp_path):
    resolved = settings(tmp_path, NAMED)
    run = tmp_path / "run"
    resume = find_resume(resolved, prefix="sft-")
    assert (found(resume), resume.notes) == ((run, None, False), [])
    run.mkdir()
    assert find_resume(resolved).notes == []
    RunFolder(run).append_metrics(0, {})
    assert find_resume(resolved).notes == [f"{run} has no checkpoint yet: starting from step 0"]
    save(run, resolved, 1, 2, 3)
    damage(run, 3)
    resume = find_resume(resolved)
    assert found(resume) == (run, 2, False) and resume.resolved is resolved
    assert "DAMAGED" in resume.notes[0] and "step-000003" in resume.notes[0] and len(resume.notes) == 2
    assert resume.notes[1] == f"going on from {run / 'checkpoints' / 'step-000002'}"
    for step in (1, 2):
        damage(run, step)
    with pytest.raises(checkpoint.CheckpointError, match="no intact checkpoint is left in") as caught:
        find_resume(resolved)
    assert all(f"step-{step:06d}" in str(caught.value) for step in (1, 2, 3))


def test_a_run_that_is_started_anew_moves_the_earlier_ones_aside_by_number(tmp_path):
    resolved = settings(tmp_path, NAMED, "trainer.resume_mode=disable")
    assert find_resume(resolved).notes == []
    for number in (1, 2):
        save(tmp_path / "run", resolved, number)
        resume = find_resume(resolved)
        assert found(resume) == (tmp_path / "run", None, False) and not (tmp_path / "run").exists()
        aside = tmp_path / f"run.old-{number:03d}"
        assert str(aside) in resume.notes[0] and (aside / "checkpoints" / f"step-{number:06d}").is_dir()
    held = RunFolder(tmp_path / "run").open()
    with pytest.raises(RunLocked, match="in use by process"):
        find_resume(resolved)
    held.close()
    assert (tmp_path / "run").is_dir() and not (tmp_path / "run.old-003").exists()


def test_a_checkpoint_or_a_run_that_is_named_by_its_path(tmp_path):
    home, other = tmp_path / "home" / "run", tmp_path / "elsewhere"
    save(home, settings(other, NAMED), 1, 2)
    first = home / "checkpoints" / "step-000001"

    def start(path: Path, *words: str) -> Resume:
        return find_resume(settings(other, f"trainer.resume_mode={path}", *words))

    assert found(start(home, UNNAMED)) == (home, 2, False)
    assert found(find_resume(settings(tmp_path / "home", f"trainer.resume_mode={home}", NAMED))) == (home, 2, False)
    assert found(start(home, "trainer.experiment_name=new")) == (other / "new", 2, True)
    resume = start(first, UNNAMED)
    assert found(resume) == (home, 1, True) and resume.notes == [f"going on from {first} in {home}"]
    resume = start(first, "trainer.experiment_name=new")
    assert found(resume) == (other / "new", 1, True) and resume.notes == [f"going on from {first} in {other / 'new'}"]
    same = find_resume(settings(tmp_path / "home", f"trainer.resume_mode={first}", NAMED))
    assert found(same) == (home, 1, True)
    with pytest.raises(ResumeRefused, match=r"trainer\.seed"):
        start(first, "trainer.seed=99")
    damage(home, 1)
    with pytest.raises(checkpoint.CheckpointError, match=r"config\.json"):
        start(first)
    damage(home, 2)
    with pytest.raises(checkpoint.CheckpointError, match="no intact checkpoint to go on from"):
        start(home, "trainer.experiment_name=new")


def unnamed(tmp_path: Path, *overrides: str) -> ResolvedConfig:
    return settings(tmp_path, UNNAMED, *overrides)


def make_run(folder: Path, resolved: ResolvedConfig, text: str | None = None) -> RunFolder:
    """A run folder with a config and one checkpoint."""
    save(folder, resolved, 1)
    run = RunFolder(folder)
    run.config_file.write_text(resolved.to_yaml() if text is None else text)
    return run


def test_an_unnamed_run_gets_the_number_after_the_highest(tmp_path):
    resolved = unnamed(tmp_path)
    assert found(find_resume(resolved, "sft-"))[0].name == "sft-tiny-arithmetic-001"
    for name in (
        "tiny-arithmetic-002",
        "tiny-arithmetic-009",
        "tiny-arithmetic-x",
        "tiny-arithmetic-010-old",
        "my-tiny-arithmetic-050",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "tiny-arithmetic-070").touch()  # not a folder
    assert found(find_resume(resolved)) == (tmp_path / "tiny-arithmetic-010", None, False)
    assert found(find_resume(resolved, "sft-"))[0].name == "sft-tiny-arithmetic-001"


def test_an_unnamed_run_goes_on_with_the_last_one_of_the_same_config_that_is_unfinished_and_free(tmp_path):
    resolved = unnamed(tmp_path)
    run = make_run(tmp_path / "tiny-arithmetic-003", resolved)
    new = tmp_path / "tiny-arithmetic-004", None, False
    assert found(find_resume(resolved)) == (run.path, 1, False)
    assert found(find_resume(unnamed(tmp_path, "trainer.resume_mode=disable"))) == new and run.path.exists()
    assert found(find_resume(unnamed(tmp_path, "trainer.total_training_steps=9"))) == new
    held = RunFolder(run.path).open()
    assert found(find_resume(resolved)) == new
    held.close()
    write_json(run.result_file, {"steps": 1})
    assert found(find_resume(resolved)) == new


@pytest.mark.parametrize(
    ("section", "changes", "same"),
    [
        ("trainer", {"experiment_name": "earlier", "resume_mode": "there"}, True),
        ("data", {"shuffle": None}, True),  # a key that is newer than the run had its default
        ("data", {"train_batch_size": 7}, True),  # chosen for the machine, as nobody set it
        ("data", {"seed": 7}, False),
        ("trainer", {"seed": 99}, False),
        ("trainer", {"unknown": 1}, False),
    ],
)
def test_the_config_of_the_last_run_is_compared(tmp_path, section, changes, same):
    resolved = unnamed(tmp_path)
    saved = resolved.to_dict()
    saved[section] |= changes
    saved[section] = {key: value for key, value in saved[section].items() if changes.get(key, 0) is not None}
    run = make_run(tmp_path / "tiny-arithmetic-001", resolved, yaml.safe_dump(saved))
    assert (found(find_resume(resolved))[0] == run.path) is same


@pytest.mark.parametrize("text", ["", "[", "- 1", None])
def test_a_run_whose_config_cannot_be_read_is_another(tmp_path, text):
    run = make_run(tmp_path / "tiny-arithmetic-001", unnamed(tmp_path), text or "")
    if text is None:
        run.config_file.unlink()
    assert found(find_resume(unnamed(tmp_path)))[0].name == "tiny-arithmetic-002"


def test_sizes_that_nobody_set_are_those_of_the_checkpoint(tmp_path):
    key = next(key for key in settings(tmp_path, NAMED).auto_keys() if key.endswith("max_num_seqs"))
    save(tmp_path / "run", settings(tmp_path, NAMED, f"{key}=7"), 1)
    resume = find_resume(settings(tmp_path, NAMED))
    assert resume.resolved.get(key) == 7 and resume.checkpoint is not None
    with pytest.raises(ResumeRefused, match=f"{key}: 7 in the checkpoint, 9 now"):
        find_resume(settings(tmp_path, NAMED, f"{key}=9"))


@pytest.mark.parametrize(
    ("model", "files", "name"),
    [
        ("org/Qwen2.5-0.5B", "data/gsm8k.train.parquet", "Qwen2.5-0.5B-gsm8k.train"),
        ("org/a b", ["first.jsonl", "second.jsonl"], "a-b-first"),
        ("m/@x@", "(y).json", "x-y"),
        ("m/???", "data/é.jsonl", "run-run"),
    ],
)
def test_the_base_name_has_only_characters_of_folder_names(model, files, name):
    config = TrainerConfig()
    config.actor_rollout_ref.model.path, config.data.train_files = model, files
    assert base_name(config) == name


def test_flat_keys_keep_empty_mappings_and_lists():
    nested = {"a": {"b": 1, "c": {}, "d": {"e": [1, {"f": 2}]}}, "g": None}
    assert flatten(nested) == {"a.b": 1, "a.c": {}, "a.d.e": [1, {"f": 2}], "g": None}
