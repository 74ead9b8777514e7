"""Checkpoints that are damaged, or that lie with a manifest that matches: refused with a reason, never by a crash."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.contents import CheckpointError
from tests.support.mutations import damaged_bytes, damaged_value, to_text
from tests.support.small_checkpoint import save

JSON_FILES = ["MANIFEST.json", "training/state.json", "config.json"]
FILES = [*JSON_FILES, "model.safetensors", "training/optimizer.safetensors"]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("good"), 3)


def refused_or_whole(path: Path) -> str | None:
    """Why a checkpoint is refused. `verify`, `load` and `latest` agree, and none raises anything else."""
    reason = checkpoint.verify(path)
    newest, damaged = checkpoint.latest(path.parent)
    assert (newest == path) == (reason is None) and [d.reason for d in damaged] == ([reason] if reason else [])
    try:
        loaded = checkpoint.load(path)
    except CheckpointError as error:
        assert reason is not None and reason in str(error)
        return reason
    assert reason is None and loaded.step == 3 and loaded.tensors
    return None


def with_file(good: Path, name: str, data: bytes, *, fits: bool = False) -> str | None:
    """What is said of a copy in which one file is this; with `fits` the manifest has its size and SHA-256."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / good.name
        shutil.copytree(good, path)
        (path / name).write_bytes(data)
        if fits and name != checkpoint.MANIFEST:
            manifest = json.loads((path / checkpoint.MANIFEST).read_text())
            manifest["files"][name] = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            (path / checkpoint.MANIFEST).write_text(json.dumps(manifest))
        return refused_or_whole(path)


def test_the_checkpoint_itself_is_whole(good: Path) -> None:
    assert refused_or_whole(good) is None


@settings(max_examples=60)
@given(data=st.data())
def test_changed_bytes_are_found(good: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES))
    before = (good / name).read_bytes()
    after = data.draw(damaged_bytes(before))
    reason = with_file(good, name, after)
    if name != checkpoint.MANIFEST:
        assert (reason is None) == (after == before)


@settings(max_examples=100)
@given(data=st.data())
def test_bytes_that_fit_the_manifest_are_read_or_refused(good: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(FILES[1:]))
    with_file(good, name, data.draw(damaged_bytes((good / name).read_bytes())), fits=True)


@settings(max_examples=120)
@given(data=st.data())
def test_values_that_fit_the_manifest_are_read_or_refused(good: Path, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(JSON_FILES))
    with_file(good, name, to_text(data.draw(damaged_value(json.loads((good / name).read_text())))), fits=True)
