"""The checkpoint folder: written whole, checked against its manifest, the newest intact one used, old ones pruned."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.folder import CheckpointError, Damage
from tests.support.small_checkpoint import save


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
