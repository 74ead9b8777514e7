"""The checkpoint folder: written whole, checked against its manifest, the newest intact one used, old ones pruned."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.folder import CheckpointError, Damage
from tests.support.small_checkpoint import STATE, save


def edit_manifest(path: Path, change) -> None:
    file = path / checkpoint.MANIFEST
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def entry(data: bytes) -> dict:
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def test_what_was_saved_is_read_back(tmp_path):
    path = save(tmp_path, 3)
    assert path.name == "step-000003" and checkpoint.verify(path) is None
    loaded = checkpoint.load(path)
    assert (loaded.step, loaded.state["config"]) == (3, {})
    assert float(loaded.tensors["optimizer"]["step/w"]) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["step-000003"]


def same_size(path: Path) -> None:
    (path / "config.json").write_text('{"model": 2}')


def longer(path: Path) -> None:
    (path / "config.json").write_text('{"model": 11}')


def linked(path: Path) -> None:
    (path / "config.json").rename(path.parent / "elsewhere.json")
    (path / "config.json").symlink_to(path.parent / "elsewhere.json")


def outside(path: Path) -> None:
    (path.parent / "secret").write_bytes(b"x")
    edit_manifest(path, lambda m: m["files"].update({"../secret": entry(b"x")}))


def absolute(path: Path) -> None:
    (path.parent / "secret").write_bytes(b"x")
    edit_manifest(path, lambda m: m["files"].update({str(path.parent / "secret"): entry(b"x")}))


def unlisted(path: Path) -> None:
    (path / "training" / "extra.safetensors").write_bytes(b"x")


def unlisted_below(path: Path) -> None:
    (path / "training" / "critic").mkdir()
    (path / "training" / "critic" / "extra.safetensors").write_bytes(b"x")


def edit_entry(path: Path, **changes) -> None:
    edit_manifest(path, lambda m: m["files"]["config.json"].update(changes))


def without(name: str):
    def remove(path: Path) -> None:
        (path / name).unlink()
        edit_manifest(path, lambda m: m["files"].pop(name))

    return remove


DAMAGES = [
    (same_size, "config.json does not match its SHA-256"),
    (longer, "config.json has 13 bytes, expected 12"),
    (linked, "config.json is missing"),
    (outside, "outside the checkpoint"),
    (absolute, "outside the checkpoint"),
    (unlisted, "extra.safetensors is not in MANIFEST.json"),
    (unlisted_below, "training/critic/extra.safetensors is not in MANIFEST.json"),
    (lambda path: edit_entry(path, size="12"), "cannot be read (it has no size and SHA-256 of 'config.json')"),
    (lambda path: edit_entry(path, sha256=None), "cannot be read (it has no size and SHA-256 of 'config.json')"),
    (lambda path: edit_manifest(path, lambda m: m["files"].update({"": entry(b"")})), "outside the checkpoint"),
    (lambda path: edit_manifest(path, lambda m: m.pop("format")), "has format None, this version reads 1"),
    (without("training/optimizer.safetensors"), "training/optimizer.safetensors is not in MANIFEST.json"),
    (without("training/state.json"), "training/state.json is not in MANIFEST.json"),
    (without("config.json"), "config.json is not in MANIFEST.json"),
    (lambda path: (path / "training" / "state.json").unlink(), "training/state.json is missing"),
    (lambda path: (path / checkpoint.MANIFEST).unlink(), "MANIFEST.json is missing"),
    (lambda path: (path / checkpoint.MANIFEST).write_text("{"), "MANIFEST.json is not JSON"),
    (lambda path: edit_manifest(path, lambda m: m.update(format=2)), "has format 2"),
]


@pytest.mark.parametrize(("damage", "problem"), DAMAGES, ids=[problem for _, problem in DAMAGES])
def test_a_damaged_checkpoint_is_named_and_the_newest_intact_one_used(tmp_path, damage, problem):
    for step in (2, 9, 10):
        save(tmp_path, step)
    bad = tmp_path / "step-000010"
    damage(bad)
    assert problem in checkpoint.verify(bad)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(bad)
    assert problem in str(caught.value) and str(bad) in str(caught.value)
    path, damaged = checkpoint.latest(tmp_path)
    assert path.name == "step-000009" and damaged == [Damage(bad, checkpoint.verify(bad))]


def test_an_older_checkpoint_is_one_of_a_step_before(tmp_path):
    for step in (2, 5, 7):
        save(tmp_path, step)
    longer(tmp_path / "step-000005")
    assert checkpoint.latest(tmp_path, before=7) == (
        tmp_path / "step-000002",
        [Damage(tmp_path / "step-000005", "config.json has 13 bytes, expected 12")],
    )
    assert checkpoint.latest(tmp_path, before=5) == (tmp_path / "step-000002", [])
    assert checkpoint.latest(tmp_path, before=8) == (tmp_path / "step-000007", [])
    assert checkpoint.latest(tmp_path, before=2) == checkpoint.latest(tmp_path, before=0) == (None, [])


@pytest.mark.parametrize(
    ("best", "left"), [((), {4, 5}), ((2,), {2, 4, 5}), ((5, 4), {4, 5}), ((1, 3, 9), {1, 3, 4, 5})]
)
def test_the_best_checkpoints_stay_beside_the_last_ones(tmp_path, best, left):
    for step in range(1, 6):
        (tmp_path / f"step-{step:06d}").mkdir()
    checkpoint.prune(tmp_path, 2, 5, best)
    assert {p.name for p in tmp_path.iterdir()} == {f"step-{step:06d}" for step in left}


def test_sets_of_tensors_are_found_by_their_names_below_the_training_folder(tmp_path):
    def write_model(path: Path) -> None:
        (path / "config.json").write_text("{}")
        save_file({"w": torch.zeros(2)}, path / "model.safetensors")

    sets = {"optimizer": {"step/w": torch.tensor(1.0)}, "critic/optimizer": {"a": torch.arange(6.0).view(2, 3).T}}
    points, beats = [], []
    path = checkpoint.save(
        tmp_path / "new",
        12,
        write_model=write_model,
        tensors=sets,
        state=checkpoint.state_text(12, STATE),
        beat=lambda: beats.append(len(points)),
        hook=points.append,
    )
    loaded = checkpoint.load(path)
    assert sorted(loaded.set_names) == ["critic/optimizer", "optimizer"] == sorted(loaded.tensors)
    assert loaded.tensors["critic/optimizer"]["a"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert points == ["save:begin", "save:model", "save:optimizer", "save:state", "save:manifest", "save:renamed"]
    # A sign of progress at every point, after each set, and for each of the five files of the manifest.
    assert beats == [0, 1, 2, 2, 2, 3, 4, 4, 4, 4, 4, 4, 5]
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    files = {p.relative_to(path).as_posix(): entry(p.read_bytes()) for p in path.rglob("*") if p.is_file()}
    files.pop(checkpoint.MANIFEST)
    assert manifest == {"format": 1, "files": files} and len(files) == 5


def test_a_step_that_is_written_again_replaces_the_earlier_one_at_once(tmp_path):
    first = save(tmp_path, 4)
    (first / "extra.txt").touch()
    seen = {}

    def look(point: str) -> None:
        seen[point] = sorted(p.name for p in tmp_path.iterdir())

    save(tmp_path, 4, hook=look)
    assert seen["save:manifest"] == [".tmp-step-000004", "step-000004"]
    assert seen["save:renamed"] == [".tmp-old-step-000004", "step-000004"]
    assert [p.name for p in tmp_path.iterdir()] == ["step-000004"] and not (first / "extra.txt").exists()


def test_shards_are_written_beside_the_sets_and_stand_for_the_optimizer(tmp_path):
    def write_shards(folder: Path) -> None:
        (folder / "shards").mkdir()
        (folder / "shards" / "index.json").write_text('{"sets": ["optimizer"]}')

    path = save(tmp_path, 3, write_shards=write_shards)
    without("training/optimizer.safetensors")(path)
    assert checkpoint.verify(path) is None and checkpoint.load(path).set_names == ["optimizer"]
    without("training/shards/index.json")(path)
    assert checkpoint.verify(path).endswith("is not in MANIFEST.json, nor training/shards/index.json")


def test_the_model_alone_is_exported_whole_or_not_at_all(tmp_path, monkeypatch):
    path = save(tmp_path / "checkpoints", 3)
    (tmp_path / ".tmp-out").mkdir()
    (tmp_path / ".tmp-out" / "rest").touch()
    (tmp_path / "out").mkdir()
    checkpoint.export(path, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["config.json", "model.safetensors"]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "out"] and checkpoint.verify(path) is None
    with pytest.raises(CheckpointError, match=r"out: could not write the model: .*; it is in .*step-000003"):
        checkpoint.export(path, tmp_path / "out")  # not empty any more
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "out"]


def test_steps_are_ordered_by_number(tmp_path):
    for step in (1_000_000, 2, 999_999):
        save(tmp_path, step)
    (tmp_path / "notes").mkdir()
    assert [p.name for p in checkpoint.all_steps(tmp_path)] == ["step-000002", "step-999999", "step-1000000"]
    assert checkpoint.latest(tmp_path)[0].name == "step-1000000"
    assert checkpoint.latest(tmp_path / "none") == (None, []) and checkpoint.all_steps(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("keep", "newest", "left"),
    [(2, 5, {4, 5}), (1, 5, {5}), (9, 5, {1, 2, 3, 4, 5}), (None, 5, {1, 2, 3, 4, 5}), (0, 5, {1, 2, 3, 4, 5}), (1, 3, {3, 4, 5})],
)  # fmt: skip
def test_old_checkpoints_and_remains_are_removed(tmp_path, keep, newest, left):
    for step in range(1, 6):
        save(tmp_path, step)
    (tmp_path / ".tmp-step-000006").mkdir()
    checkpoint.prune(tmp_path, keep, newest)
    assert {p.name for p in tmp_path.iterdir()} == {f"step-{step:06d}" for step in left}


@pytest.mark.parametrize("point", ["save:begin", "save:model", "save:optimizer", "save:state", "save:manifest"])
def test_a_save_that_ends_early_leaves_the_earlier_one(tmp_path, point):
    save(tmp_path, 4)
    before = (tmp_path / "step-000004" / checkpoint.MANIFEST).read_text()

    def full(at: str) -> None:
        if at == point:
            raise OSError(28, "No space left on device")

    for step in (4, 5):
        with pytest.raises(CheckpointError, match="earlier checkpoints are untouched"):
            save(tmp_path, step, hook=full)
    assert [p.name for p in tmp_path.iterdir()] == ["step-000004"]
    assert (tmp_path / "step-000004" / checkpoint.MANIFEST).read_text() == before
    assert checkpoint.verify(save(tmp_path, 4)) is None  # written again


@pytest.mark.parametrize("umask, expected", [(0o022, 0o644), (0o077, 0o600)])
def test_files_have_the_permissions_that_the_umask_gives(tmp_path, umask, expected):
    def write_model(folder: Path) -> None:
        (folder / "model.safetensors").write_bytes(b"weights")
        (folder / "model.safetensors").chmod(0o600)  # as safetensors writes it

    before = os.umask(umask)
    try:
        path = checkpoint.save(
            tmp_path,
            1,
            write_model=write_model,
            tensors={"optimizer": {"a": torch.ones(2)}},
            state=checkpoint.state_text(1, {}),
        )
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in path.rglob("*") if file.is_file()}
    assert modes == dict.fromkeys(
        ("model.safetensors", "optimizer.safetensors", "state.json", checkpoint.MANIFEST), expected
    )
