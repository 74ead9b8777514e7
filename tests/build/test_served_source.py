"""Which model the words of `gspo serve`, `gspo chat` and `gspo generate` mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.build.served.source import ModelSource, find_source
from gspo.models import ModelError
from tests.support import small_checkpoint


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with two checkpoints, in the home folder, which is also where the words are typed."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "runs" / "mine"
    for step in (2, 10):
        small_checkpoint.save(folder / "checkpoints", step)
    (folder / "config.yaml").write_text("data: {apply_chat_template_kwargs: {a: 1}}\ntrainer: {seed: 3}\n")
    return folder


def test_a_run_means_its_newest_intact_checkpoint(run: Path) -> None:
    for words in ("runs/mine", "~/runs/mine", str(run)):
        found = find_source(words)
        assert Path(found.path).resolve() == run / "checkpoints" / "step-000010"
        assert found.name == "mine" and found.run is not None and found.run.resolve() == run
        assert found.settings["trainer.seed"] == 3
    (run / "checkpoints" / "step-000010" / "config.json").write_text("{}")
    assert Path(find_source("runs/mine").path).name == "step-000002"
    (run / "checkpoints" / "step-000002" / "config.json").write_text("{}")
    with pytest.raises(ModelError, match=r"this run has no checkpoint \(step-0000\d\d: .*\); give a model's folder"):
        find_source("runs/mine")


def test_a_checkpoint_has_the_settings_of_its_run_wherever_it_is_typed(run: Path, monkeypatch) -> None:
    saved = run / "checkpoints" / "step-000002"
    for folder, words in (
        (run.parents[1], "runs/mine/checkpoints/step-000002"),
        (run.parents[1], str(saved)),
        (run.parents[1], "~/runs/mine/checkpoints/step-000002"),
        (run, "checkpoints/step-000002"),
        (run / "checkpoints", "step-000002"),
        (run / "checkpoints", "./step-000002"),
    ):
        monkeypatch.chdir(folder)
        found = find_source(words)
        assert (Path(found.path).resolve(), found.name) == (saved, "mine/step-000002")
        assert found.run == run and found.settings["trainer.seed"] == 3


def test_other_folders_and_names_are_models_without_a_run(run: Path) -> None:
    assert find_source("org/model") == ModelSource("org/model", "org/model")
    (run.parent / "plain").mkdir()
    assert find_source("runs/plain") == ModelSource("runs/plain", "plain")
    copied = run.parent / "other" / "checkpoints" / "step-000002"  # of a folder that is no run
    copied.mkdir(parents=True)
    assert find_source(str(copied)) == ModelSource(str(copied), "step-000002")
    (run / "config.yaml").unlink()
    assert find_source("runs/mine") == ModelSource("runs/mine", "mine")
