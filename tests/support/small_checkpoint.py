"""A whole checkpoint of a few bytes, for tests of the folder around it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gspo.checkpoint import folder as checkpoint

STATE = {name: {} for name in ("config", "fingerprint", "counters", "sampler", "objective")}


def save(folder: Path, step: int, *, values: Mapping[str, Any] = STATE, **options: Any) -> Path:
    """Write the checkpoint of a step with one weight and one moment; `values` are the rest of its state."""

    def write_model(path: Path) -> None:
        (path / "config.json").write_text('{"model": 1}')
        save_file({"w": torch.zeros(2)}, path / "model.safetensors")

    tensors = {"optimizer": {"step/w": torch.tensor(float(step))}}
    state = checkpoint.state_text(step, values)
    return checkpoint.save(folder, step, write_model=write_model, tensors=tensors, state=state, **options)
