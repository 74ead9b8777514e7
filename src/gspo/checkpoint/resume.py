"""The folder of a run, the checkpoint from which it resumes, and which keys may change in between."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo import untrusted
from gspo.checkpoint import folder as checkpoint
from gspo.config import ResolvedConfig, TrainerConfig
from gspo.config.loading import tree
from gspo.paths import user_path
from gspo.runs.folder import RunFolder


class ResumeRefused(ValueError):
    """The checkpoint belongs to a different computation; the message names each difference."""


@dataclass(frozen=True, slots=True)
class Resume:
    """The run's folder, the checkpoint from which it starts (None: from step 0), and notes for the user.

    `resolved` is the config with which it goes on: sizes that nobody set are those of the checkpoint.
    """

    run: RunFolder
    resolved: ResolvedConfig
    checkpoint: checkpoint.Loaded | None = None
    notes: list[str] = field(default_factory=list)
    chosen: bool = False  # the user named this checkpoint: no other one takes its place

    def older(self, loaded: checkpoint.Loaded, error: Exception) -> checkpoint.Loaded:
        """The newest intact checkpoint before one that cannot be resumed because of `error`; raises when there is none."""
        path = None
        if not self.chosen:
            path, _ = checkpoint.latest(loaded.path.parent, before=loaded.step)
        if path is None:
            raise checkpoint.CheckpointError(str(error)) from error
        return checkpoint.load(path)


def find_resume(resolved: ResolvedConfig, prefix: str = "") -> Resume:
    """Choose folder and checkpoint according to `trainer.resume_mode`. Notes name damaged checkpoints.

    The name of a run without a name begins with `prefix`.
    """
    trainer = resolved.config.trainer
    if trainer.resume_mode not in ("auto", "disable"):
        return _from_path(resolved, user_path(trainer.resume_mode))
    runs = user_path(trainer.default_local_dir)
    if trainer.experiment_name is None:
        return _unnamed(resolved, runs, prefix + base_name(resolved.config))
    run = RunFolder(runs / trainer.experiment_name)
    if trainer.resume_mode == "disable":
        return Resume(run, resolved, notes=_move_aside(run))
    return _resume_run(resolved, run)


def _resume_run(resolved: ResolvedConfig, run: RunFolder) -> Resume:
    """From the newest intact checkpoint of a run folder, or from step 0 when it has none."""
    path, damaged = checkpoint.latest(run.checkpoints)
    notes = [f"DAMAGED checkpoint {d.path}: {d.reason}; it is not used" for d in damaged]
    if path is None:
        if damaged:
            raise checkpoint.CheckpointError(
                "\n".join(notes)
                + f"\nno intact checkpoint is left in {run.checkpoints}; restore one, or start anew with "
                "trainer.resume_mode=disable (which moves this run aside)"
            )
        if run.metrics_file.exists():
            notes.append(f"{run.path} has no checkpoint yet: starting from step 0")
        return Resume(run, resolved, notes=notes)
    loaded = checkpoint.load(path)
    resolved = _going_on(resolved, loaded)
    notes.append(f"going on from {path}")
    return Resume(run, resolved, loaded, notes)


def _from_path(resolved: ResolvedConfig, path: Path) -> Resume:
    """From a checkpoint, or the newest one of a run folder, into its run or trainer.experiment_name."""
    trainer, is_run = resolved.config.trainer, (path / "checkpoints").is_dir()
    own = path if is_run else path.parent.parent
    name = trainer.experiment_name
    home = RunFolder(own if name is None else user_path(trainer.default_local_dir) / name)
    if is_run and home.path.resolve() == own.resolve():
        return _resume_run(resolved, RunFolder(path))
    if is_run:
        newest, _ = checkpoint.latest(path / "checkpoints")
        if newest is None:
            raise checkpoint.CheckpointError(f"{path} has no intact checkpoint to go on from in {home.path}")
        path = newest
    loaded = checkpoint.load(path)
    resolved = _going_on(resolved, loaded)
    return Resume(home, resolved, loaded, [f"going on from {path} in {home.path}"], chosen=True)


def _unnamed(resolved: ResolvedConfig, runs: Path, base: str) -> Resume:
    """A run without a name: the last one of its base name if it has the same config and is unfinished, else a new one."""
    folders = [p.name for p in runs.iterdir() if p.is_dir()] if runs.is_dir() else []
    matches = [re.fullmatch(rf"{re.escape(base)}-(\d+)", name) for name in folders]
    last = max((int(m.group(1)) for m in matches if m), default=0)
    if last and resolved.config.trainer.resume_mode == "auto":
        run = RunFolder(runs / f"{base}-{last:03d}")
        if run.result() is None and not run.locked() and _same(run, resolved):
            return _resume_run(resolved, run)
    return Resume(RunFolder(runs / f"{base}-{last + 1:03d}"), resolved)


def _going_on(resolved: ResolvedConfig, loaded: checkpoint.Loaded) -> ResolvedConfig:
    """The config with which a checkpoint is continued; ResumeRefused where keys differ that must not change."""
    resolved = resolved.keeping_sizes(flatten(loaded.state["config"]))
    refuse_differences(loaded.state["config"], resolved.to_dict(), loaded.path)
    return resolved


def base_name(config: TrainerConfig) -> str:
    """`<model>-<data>` from the config, with characters that are valid in a folder name."""
    files = config.data.train_files
    data = files if isinstance(files, str) else files[0]
    parts = [Path(config.actor_rollout_ref.model.path).name, Path(str(data)).stem]
    return "-".join(re.sub(r"[^A-Za-z0-9._]+", "-", part).strip("-") or "run" for part in parts)


def _same(run: RunFolder, resolved: ResolvedConfig) -> bool:
    """Whether a run folder has this config, apart from name and resume mode."""
    try:
        saved = untrusted.read_yaml(run.config_file)
    except (OSError, untrusted.Unreadable):
        return False
    theirs = _defaults() | flatten(saved if isinstance(saved, dict) else {})  # keys may be newer than the run
    ours = _defaults() | flatten(resolved.to_dict())
    ours |= {key: theirs[key] for key in resolved.auto_keys()}
    for name in ("trainer.experiment_name", "trainer.resume_mode"):
        ours.pop(name, None)
        theirs.pop(name, None)
    return ours == theirs


def _move_aside(run: RunFolder) -> list[str]:
    """Rename an earlier run of this name, so that it is not overwritten."""
    if not run.path.exists():
        return []
    number = 1
    while (target := run.path.with_name(f"{run.name}.old-{number:03d}")).exists():
        number += 1
    if run.locked():
        run.open()  # raises RunLocked with the holder's number
    run.path.rename(target)
    return [f"trainer.resume_mode=disable: the earlier run was moved to {target}"]


def refuse_differences(saved: Mapping[str, Any], now: Mapping[str, Any], path: Path) -> None:
    """Raise ResumeRefused if keys differ that must not change on resume, naming all of them.

    A key that the checkpoint does not have had its default: it is newer than the checkpoint.
    """
    old, new = _defaults() | flatten(saved), _defaults() | flatten(now)
    lines = [
        f"  {key}: {old.get(key, 'unset')!r} in the checkpoint, {new.get(key, 'unset')!r} now"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key) and not _may_change(key)
    ]
    if lines:
        raise ResumeRefused(
            f"{path} cannot be resumed with another computation:\n" + "\n".join(lines) + "\n"
            "Set them back, give the new run another trainer.experiment_name, or branch from it: gspo branch RUN NEW "
            "key=value …"
        )


def _defaults() -> dict[str, Any]:
    return {key: leaf.default for key, leaf in tree.leaves().items()}


def _may_change(key: str) -> bool:
    leaf = tree.leaf_of(key)
    return leaf is not None and leaf.info.may_change_on_resume


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as dotted keys."""
    out: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            out |= flatten(value, f"{prefix}{key}.")
        else:
            out[f"{prefix}{key}"] = value
    return out
