"""Branches: a new run folder that begins with a checkpoint of another run and has other settings.

The folder holds the checkpoint with the new settings in its state, the metrics and evaluations up to its step, and
`ancestry.json`. After that it is a run like any other, and is resumed like one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gspo.checkpoint import folder as checkpoint
from gspo.checkpoint.contents import EXAMPLES, STATE, CheckpointError
from gspo.checkpoint.resume import flatten
from gspo.config import ResolvedConfig
from gspo.runs.files import write_json
from gspo.runs.folder import RunFolder, step_of
from gspo.runs.reading import read_object

# Facts about a run that a branch may change, as `build.fingerprint` names them.
FREE_FACTS = ("training data", "steps of the learning-rate schedule")
# Keys with which the state of the sampler (position in the data, groups carried over) loses its meaning.
SAMPLING = ("data.", "algorithm.filter_groups.", "actor_rollout_ref.rollout.", "reward", "custom_reward_function.")
SAMPLING += ("environment.", "trainer.seed")
OWN_NAMES = ("trainer.experiment_name", "trainer.default_local_dir", "trainer.resume_mode")


@dataclass(frozen=True, slots=True)
class Branch:
    """A new run folder, the step at which it begins, the keys that differ, and whether sampling starts anew."""

    run: RunFolder
    step: int
    changed: dict[str, tuple[Any, Any]]
    samples_anew: bool


def find_checkpoint(run: RunFolder, step: int | None) -> checkpoint.Loaded:
    """The checkpoint of a step, or the newest intact one; CheckpointError names those that the run has."""
    found = [step_of(path.name) for path in checkpoint.all_steps(run.checkpoints)]
    if not found:
        raise CheckpointError(f"{run.path}: has no checkpoint to branch from")
    if step is None:
        path, damaged = checkpoint.latest(run.checkpoints)
        if path is None:
            raise CheckpointError(f"{damaged[0].path}: {damaged[0].reason}")
        return checkpoint.load(path)
    if step not in found:
        kept = ", ".join(map(str, found))
        raise CheckpointError(
            f"{run.path}: has no checkpoint of step {step}; it has those of {kept} (trainer.max_actor_ckpt_to_keep)"
        )
    return checkpoint.load(run.checkpoints / f"step-{step:06d}")


def is_supervised(loaded: checkpoint.Loaded) -> bool:
    """Whether the checkpoint is one of `gspo sft` or `gspo rm`."""
    return EXAMPLES[0] in loaded.state


def make_branch(parent: RunFolder, loaded: checkpoint.Loaded, new: Path, resolved: ResolvedConfig) -> Branch:
    """Make the folder of the new run from a checkpoint of `parent`. It is complete or not there."""
    if new.exists():
        raise CheckpointError(f"{new}: exists; give the new run another name")
    changed = _differences(flatten(loaded.state["config"]), flatten(resolved.to_dict()))
    anew = not is_supervised(loaded) and any(key.startswith(SAMPLING) for key in changed)
    temporary = new.with_name(f".tmp-{new.name}")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        copy = temporary / "checkpoints" / loaded.path.name
        shutil.copytree(loaded.path, copy, copy_function=_link_or_copy)
        _write_state(copy, _branched(loaded.state, loaded.step, resolved, anew))
        branched = RunFolder(temporary)
        _copy_records(parent, branched, loaded.step)
        branched.config_file.write_text(resolved.to_yaml(with_origins=True), encoding="utf-8")
        write_json(branched.settings_file, resolved.records())
        write_json(temporary / "ancestry.json", _ancestry(parent, loaded.step, changed))
        os.rename(temporary, new)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(f"{new}: could not write the branch: {error}") from error
    return Branch(RunFolder(new), loaded.step, changed, anew)


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    keys = [key for key in sorted(old.keys() | new.keys()) if key not in OWN_NAMES]
    return {key: (old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)}


def _branched(state: Mapping[str, Any], step: int, resolved: ResolvedConfig, anew: bool) -> dict[str, Any]:
    """The state of the checkpoint for the new run. Sampling that starts anew needs only the version of the weights."""
    facts = {name: value for name, value in state["fingerprint"].items() if name not in FREE_FACTS}
    own = {"config": resolved.to_dict(), "fingerprint": facts}
    return {**state, **own, **({"sampler": {"version": step}} if anew else {})}


def _write_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace the state of a copied checkpoint, in its manifest too."""
    text = json.dumps(state).encode()
    manifest = json.loads((path / checkpoint.MANIFEST).read_text())
    manifest["files"][STATE] = {"size": len(text), "sha256": hashlib.sha256(text).hexdigest()}
    for name, content in ((STATE, text), (checkpoint.MANIFEST, json.dumps(manifest, indent=1).encode())):
        (path / name).unlink()  # it may be a link to the parent's file
        (path / name).write_bytes(content)


def _copy_records(parent: RunFolder, new: RunFolder, step: int) -> None:
    """Metrics and evaluations up to a step, so that the new run's curves begin where the parent's do."""
    rows = [row for row in parent.rows() if row["step"] <= step]
    new.metrics_file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if parent.environment_file.is_file():  # until the new run writes its own
        shutil.copy2(parent.environment_file, new.environment_file)
    new.evals.mkdir(exist_ok=True)
    for file in parent.evals.glob("step-*.jsonl.gz"):
        if step_of(file.name) <= step:
            _link_or_copy(str(file), str(new.evals / file.name))


def _ancestry(parent: RunFolder, step: int, changed: Mapping[str, tuple[Any, Any]]) -> dict[str, Any]:
    """Where a run comes from: its parent and the step, what differs, and the parent's own ancestry."""
    changes = [{"key": key, "from": old, "to": new} for key, (old, new) in changed.items()]
    earlier = read_object(parent.path / "ancestry.json")
    return {"run": str(parent.path), "step": step, "changed": changes, **({"parent": earlier} if earlier else {})}


def _link_or_copy(source: str, target: str) -> None:
    """A second name of the file where the disk allows it: files of a checkpoint are never changed."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
