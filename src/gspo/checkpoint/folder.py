"""Checkpoints: a Hugging Face folder with the training state, written atomically.

`checkpoints/step-NNNNNN/` holds the model and tokenizer as `transformers` saves them, `training/optimizer.safetensors`
and other tensor sets (in `training/shards/` where ranks write their parts), `training/state.json`, and `MANIFEST.json`
with the size and SHA-256 of every other file. It is written under a temporary name, synced, then renamed. Only
safetensors and JSON are read back, never pickle.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from gspo.checkpoint.tensor_sets import INDEX, SHARDS, TensorSet, read_sets
from gspo.runs.files import sync_file, sync_folder
from gspo.runs.folder import step_of

MANIFEST = "MANIFEST.json"
FORMAT = 1


class CheckpointError(RuntimeError):
    """There is no usable checkpoint, or one cannot be written."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A checkpoint that does not match its manifest."""

    path: Path
    reason: str


@dataclass(frozen=True)
class Loaded:
    """A verified checkpoint and its state."""

    path: Path
    step: int
    state: dict[str, Any]

    @cached_property
    def tensors(self) -> dict[str, TensorSet]:
        """The tensor sets beside the model, by name, without sharding."""
        files = json.loads((self.path / MANIFEST).read_text())["files"]
        below = [name.removeprefix("training/") for name in files if name.startswith("training/")]
        return read_sets(self.path / "training", below)


def save(
    folder: Path,
    step: int,
    *,
    write_model: Callable[[Path], None],
    tensors: Mapping[str, TensorSet],
    state: str,
    write_shards: Callable[[Path], None] | None = None,
    beat: Callable[[], None] = lambda: None,
    hook: Callable[[str], None] = lambda point: None,
) -> Path:
    """Write `step-NNNNNN` atomically. Each set of `tensors` is written to `training/<name>.safetensors`.

    `state` is a result of `state_text`. `write_shards(folder)` writes the sets that ranks hold in parts
    (tensor_sets.write_sets). `beat` is called after each file and may raise to end the save. `hook` is called at named
    points, for fault injection.
    """
    from safetensors.torch import save_file

    final = folder / f"step-{step:06d}"
    temporary = folder / f".tmp-{final.name}"

    def reach(point: str) -> None:
        beat()
        hook(point)

    try:
        shutil.rmtree(temporary, ignore_errors=True)
        (temporary / "training").mkdir(parents=True)
        reach("save:begin")
        write_model(temporary)
        reach("save:model")
        for name, members in tensors.items():
            file = temporary / "training" / f"{name}.safetensors"
            file.parent.mkdir(parents=True, exist_ok=True)
            save_file({key: t.detach().contiguous() for key, t in members.items()}, file)
            beat()
        if write_shards is not None:
            write_shards(temporary / "training")
        reach("save:optimizer")
        (temporary / "training" / "state.json").write_text(state)
        reach("save:state")
        _write_manifest(temporary, beat)
        reach("save:manifest")
        aside = folder / f".tmp-old-{final.name}"
        if final.exists():  # a run that resumed from an older checkpoint writes this step again
            shutil.rmtree(aside, ignore_errors=True)
            os.rename(final, aside)
        os.rename(temporary, final)
        reach("save:renamed")
        sync_folder(folder)
        shutil.rmtree(aside, ignore_errors=True)
    except (OSError, SafetensorError) as error:  # safetensors wraps a full disk in its own error
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"{final}: could not write the checkpoint: {error}; earlier checkpoints are untouched"
        ) from error
    return final


def state_text(step: int, state: Mapping[str, Any]) -> str:
    """The content of `state.json` at a step boundary."""
    return json.dumps({"format": FORMAT, "step": step, **state})


def _write_manifest(folder: Path, beat: Callable[[], None]) -> None:
    files = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        sync_file(path)
        files[path.relative_to(folder).as_posix()] = {"size": path.stat().st_size, "sha256": _digest(path)}
        beat()
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": files}, indent=1))
    sync_file(folder / MANIFEST)
    for path in (*(p for p in folder.rglob("*") if p.is_dir()), folder):
        sync_folder(path)


def _digest(path: Path) -> str:
    with open(path, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def verify(path: Path) -> str | None:
    """Why a checkpoint does not match its manifest; None when it does."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        entries = [(name, entry["size"], entry["sha256"]) for name, entry in files.items()]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__}: {error})"
    if manifest.get("format") != FORMAT:
        return f"{MANIFEST} has format {manifest.get('format')!r}, this version reads {FORMAT}"
    for name, size, digest in entries:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            return f"{MANIFEST} names {name!r}, which is outside the checkpoint"
        file = path / name
        if file.is_symlink() or not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, expected {size}"
        if _digest(file) != digest:
            return f"{name} does not match its SHA-256"
    for file in (path / "training").rglob("*.safetensors"):
        if file.relative_to(path).as_posix() not in files:
            return f"{file.relative_to(path)} is not in {MANIFEST}"
    for needed in ("training/state.json", "config.json"):
        if needed not in files:
            return f"{needed} is not in {MANIFEST}"
    if "training/optimizer.safetensors" not in files and f"training/{SHARDS}/{INDEX}" not in files:
        return f"training/optimizer.safetensors is not in {MANIFEST}, nor training/{SHARDS}/{INDEX}"
    return None


def load(path: Path) -> Loaded:
    """Verify and read a checkpoint; CheckpointError names a missing or damaged one."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint")
    problem = verify(path)
    if problem:
        raise CheckpointError(f"{path}: {problem}")
    state = json.loads((path / "training" / "state.json").read_text())
    return Loaded(path, state["step"], state)


def latest(folder: Path) -> tuple[Path | None, list[Damage]]:
    """The newest intact checkpoint, and the damaged ones that are newer."""
    damaged: list[Damage] = []
    for path in all_steps(folder)[::-1]:
        problem = verify(path)
        if problem is None:
            return path, damaged
        damaged.append(Damage(path, problem))
    return None, damaged


def all_steps(folder: Path) -> list[Path]:
    """Checkpoint folders by step, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.is_dir() and step_of(p.name) >= 0), key=lambda p: step_of(p.name))


def prune(folder: Path, keep: int | None, newest: int) -> None:
    """Remove all but the last `keep` checkpoints up to step `newest`, and the remains of interrupted saves.

    Checkpoints after `newest` stay and do not count: the run has resumed before them, because they are damaged.
    """
    for path in folder.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)
    if keep is not None and keep > 0:
        for path in [p for p in all_steps(folder) if step_of(p.name) <= newest][:-keep]:
            shutil.rmtree(path, ignore_errors=True)
