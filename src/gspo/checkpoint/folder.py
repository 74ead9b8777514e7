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
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError

from gspo import untrusted
from gspo.checkpoint.contents import FORMAT, CheckpointError, find_problem, read_state
from gspo.checkpoint.tensor_sets import INDEX, SHARDS, TensorSet, read_sets, set_names
from gspo.runs.files import sync_file, sync_folder
from gspo.runs.folder import step_of
from gspo.untrusted import Unreadable

MANIFEST = "MANIFEST.json"
MAX_MANIFEST = 64 * untrusted.MiB


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

    @property
    def set_names(self) -> list[str]:
        """The names of the tensor sets beside the model."""
        return set_names(self.path / "training", self._below())

    @cached_property
    def tensors(self) -> dict[str, TensorSet]:
        """The tensor sets beside the model, by name, without sharding."""
        return read_sets(self.path / "training", self._below())

    def _below(self) -> list[str]:
        """The files in `training/`."""
        files = _read_manifest(self.path)
        return [name.removeprefix("training/") for name in files if name.startswith("training/")]


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


def export(path: Path, out: Path) -> None:
    """Copy the model and tokenizer of a checkpoint to `out`, a new or empty folder. It is complete or not there."""
    temporary = out.with_name(f".tmp-{out.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.copytree(path, temporary, ignore=lambda folder, names: {"training", MANIFEST} & set(names))
        os.rename(temporary, out)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{out}: could not write the model: {error}; it is in {path}") from error


def state_text(step: int, state: Mapping[str, Any]) -> str:
    """The content of `state.json` at a step boundary."""
    return json.dumps({"format": FORMAT, "step": step, **state})


def _write_manifest(folder: Path, beat: Callable[[], None]) -> None:
    files = {}
    permissions = (folder / "training" / "state.json").stat().st_mode & 0o777
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        path.chmod(permissions)  # safetensors writes files that only their owner can read
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
    """Why a checkpoint is not a whole state of a run, as its manifest and its content say; None when it is."""
    try:
        files = _read_manifest(path)
        return _check_files(path, files) or find_problem(path, files)
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except Unreadable as error:
        return f"{MANIFEST} {error.reason}"
    except (OSError, ValueError) as error:  # names that no file can have
        return f"cannot be read ({error})"


def _read_manifest(path: Path) -> dict[str, tuple[int, str]]:
    """Size and SHA-256 of every file by its name below the checkpoint."""
    manifest = untrusted.read_json(path / MANIFEST, MAX_MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict):
        raise Unreadable(path / MANIFEST, "cannot be read (it has no mapping `files`)")
    if manifest.get("format") != FORMAT:
        raise Unreadable(path / MANIFEST, f"has format {manifest.get('format')!r}, this version reads {FORMAT}")
    out = {}
    for name, entry in files.items():
        if not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or "\0" in name:
            raise Unreadable(path / MANIFEST, f"names {name!r}, which is outside the checkpoint")
        size, digest = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
        if not isinstance(size, int) or not isinstance(digest, str):
            raise Unreadable(path / MANIFEST, f"cannot be read (it has no size and SHA-256 of {name!r})")
        out[name] = size, digest
    return out


def _check_files(path: Path, files: Mapping[str, tuple[int, str]]) -> str | None:
    """Which file differs from the manifest; None when none does."""
    root = path.resolve()
    for name, (size, _) in files.items():
        file = path / name
        if file.is_symlink() or not file.is_file() or not file.resolve().is_relative_to(root):
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, expected {size}"
    for file in (path / "training").rglob("*.safetensors"):
        if file.relative_to(path).as_posix() not in files:
            return f"{file.relative_to(path)} is not in {MANIFEST}"
    for needed in ("training/state.json", "config.json"):
        if needed not in files:
            return f"{needed} is not in {MANIFEST}"
    if "training/optimizer.safetensors" not in files and f"training/{SHARDS}/{INDEX}" not in files:
        return f"training/optimizer.safetensors is not in {MANIFEST}, nor training/{SHARDS}/{INDEX}"
    for name, (_, digest) in files.items():
        if _digest(path / name) != digest:
            return f"{name} does not match its SHA-256"
    return None


def load(path: Path) -> Loaded:
    """Verify and read a checkpoint; CheckpointError names a missing or damaged one."""
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such checkpoint")
    problem = verify(path)
    if problem:
        raise CheckpointError(f"{path}: {problem}")
    state = read_state(path)
    return Loaded(path, state["step"], state)


def latest(folder: Path, before: int | None = None) -> tuple[Path | None, list[Damage]]:
    """The newest intact checkpoint, of a step before `before` if given, and the damaged ones that are newer."""
    damaged: list[Damage] = []
    for path in all_steps(folder)[::-1]:
        if before is not None and step_of(path.name) >= before:
            continue
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


def prune(folder: Path, keep: int | None, newest: int, best: Collection[int] = ()) -> None:
    """Remove all but the last `keep` checkpoints up to step `newest` and the `best`, and the remains of interrupted saves.

    Checkpoints after `newest` stay and do not count: the run has resumed before them, because they are damaged.
    """
    for path in folder.glob(".tmp-*"):
        shutil.rmtree(path, ignore_errors=True)
    if keep is not None and keep > 0:
        for path in [p for p in all_steps(folder) if step_of(p.name) <= newest][:-keep]:
            if step_of(path.name) in best:
                continue
            shutil.rmtree(path, ignore_errors=True)
