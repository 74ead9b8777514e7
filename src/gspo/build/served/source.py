"""Which model a user means: a folder, a hub name, a run or a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.checkpoint import folder as checkpoint
from gspo.models import ModelError
from gspo.paths import user_path
from gspo.runs.reading import read_config


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A folder or hub name with a model, what it is called, and how its run wrote prompts. `run` is the run's folder."""

    path: str
    name: str
    run: Path | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # of the run, by key


def find_source(words: str) -> ModelSource:
    """A model's folder or hub name, a run folder (its newest checkpoint), or a checkpoint in one."""
    path = user_path(words)
    if _is_run(path):
        newest, damaged = checkpoint.latest(path / "checkpoints")
        if newest is None:
            why = f" ({damaged[0].path.name}: {damaged[0].reason})" if damaged else ""
            raise ModelError(
                f"{path}: this run has no checkpoint{why}; give a model's folder, or train until it has one"
            )
        return ModelSource(str(newest), path.resolve().name, path, _settings(path))
    folder = path.absolute().parent  # of a name that is typed in this folder, too
    if path.is_dir() and folder.name == "checkpoints" and _is_run(folder.parent):
        run = folder.parent
        return ModelSource(str(path), f"{run.resolve().name}/{path.name}", run, _settings(run))
    return ModelSource(words, path.resolve().name if path.is_dir() else words)


def _is_run(path: Path) -> bool:
    return (path / "checkpoints").is_dir() and (path / "config.yaml").is_file()


def _settings(run: Path) -> dict[str, Any]:
    return {row["key"]: row["value"] for row in read_config(run)}
