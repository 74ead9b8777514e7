"""Predicted stage times compared with those that a run measured."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from gspo.config import TrainerConfig, load
from gspo.models.shape import ModelShape, shape_of
from gspo.plan.constants import DEVICES, Device, in_float32
from gspo.plan.predict import predict
from gspo.plan.split import Split
from gspo.plan.workload import Workload, workload_of
from gspo.runs.run import Run, is_run, read_run

STAGES = ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor", "update_weights")


class CheckError(ValueError):
    """A run that cannot be compared. The message names the folder, what is missing and the remedy."""


@dataclass(frozen=True)
class Comparison:
    """Rows of (stage, predicted seconds, measured seconds); measured are medians over all steps but the first."""

    shape: ModelShape
    device: Device
    num_steps: int
    rows: list[tuple[str, float, float]]

    def to_dict(self) -> dict[str, Any]:
        stages = [
            {"stage": name, "predicted_s": p, "measured_s": m, "ratio": p / m if m else None}
            for name, p, m in self.rows
        ]
        return {"model": self.shape.name, "device": self.device.name, "steps": self.num_steps, "stages": stages}


def check_run(folder: Path, gpu: str | None = None, model: str | None = None) -> Comparison:
    """Compare a run with the prediction for its config, lengths and keep rate."""
    if not is_run(folder):
        raise CheckError(f"--check {folder}: not a run folder; expected one with config.yaml and metrics.jsonl")
    run = read_run(folder)
    rows = [row for row in run.rows if isinstance(row.get("timing_s/gen"), int | float)]
    if not rows:
        raise CheckError(f"--check {folder}: metrics.jsonl has no row with timing_s/gen; expected at least one step")
    config = load(folder / "config.yaml").config
    rows = rows[1:] or rows
    device = _device(run, config, gpu)
    shape = shape_of(model or config.actor_rollout_ref.model.path)
    work = _work(config, rows)
    prediction = predict(shape, device, work, Split.of(config))
    if prediction is None:
        raise CheckError(f"--check {folder}: by the prediction this run does not fit on a {device.name}; check --gpu")
    stages = dict(prediction.stages)
    if prediction.eta:  # the run then measures how long it waits for generation, not how long that takes
        stages["gen"] = prediction.step_s - sum(s for n, s in stages.items() if n in STAGES and n != "gen")
    found: list[tuple[str, float, float]] = []
    for name in STAGES:
        seconds = [float(row[f"timing_s/{name}"]) for row in rows if f"timing_s/{name}" in row]
        if seconds:
            found.append((name, stages.get(name, 0.0), median(seconds)))
    found.append(("all of these", prediction.step_s, sum(m for _, _, m in found)))
    return Comparison(shape, device, len(rows), found)


def _device(run: Run, config: TrainerConfig, gpu: str | None) -> Device:
    name = str((run.environment or {}).get("device", "")).lower().replace(" ", "")
    key = gpu or next((d for d in DEVICES if d in name), None)
    if key is None:
        raise CheckError(f"--check {run.path}: device {name!r} is unknown; choose one with --gpu: {', '.join(DEVICES)}")
    device = DEVICES[key]
    return in_float32(device) if config.actor_rollout_ref.model.dtype == "float32" else device


def _work(config: TrainerConfig, rows: list[dict[str, Any]]) -> Workload:
    """The work of the config with the mean lengths, the longest response and the keep rate of the run."""
    mean = _mean(rows, "response_length/mean")
    longest = max((float(row.get("response_length/max") or 0) for row in rows), default=0.0)
    kept, made = (sum(float(r.get(f"train/groups_{n}") or 0) for r in rows) for n in ("kept", "generated"))
    rate = min(1.0, kept / made) if kept and made else None
    work = workload_of(config, keep_rate=rate, mean_prompt=_mean(rows, "prompt_length/mean"))
    if mean is None or work.lengths.constant:
        return work
    lengths = dataclasses.replace(
        work.lengths, mean=mean, longest=int(max(min(longest or work.lengths.longest, work.lengths.longest), mean + 1))
    )
    return dataclasses.replace(work, lengths=lengths)


def _mean(rows: list[dict[str, Any]], name: str) -> float | None:
    values = [float(row[name]) for row in rows if isinstance(row.get(name), int | float)]
    return sum(values) / len(values) if values else None
