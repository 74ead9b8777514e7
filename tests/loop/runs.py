"""Running and stopping small runs, and reading what they left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gspo.loop.trainer import Trainer
from gspo.runs.console import Console
from tests.faults.audit import recorded
from tests.support.small_run import config, even_first_byte


def trainer(folder: Path, model: Path, *overrides: str, reward: Any = even_first_byte) -> Trainer:
    return Trainer(config(folder, model, *overrides), reward_fn=reward, console=Console(enabled=False))


def train(
    folder: Path, model: Path, *overrides: str, stop_after: int | None = None, reward: Any = even_first_byte
) -> dict:
    """Train to the end, or to a stop after a step; the result."""
    return fit(trainer(folder, model, *overrides, reward=reward), stop_after)


def fit(trainer: Any, stop_after: int | None = None) -> dict:
    """The result of a trainer that goes to its end, or to a stop after a step."""
    step = trainer.train_step

    def stopping() -> None:
        step()
        if stop_after is not None and trainer.step >= stop_after:
            trainer.stop.signal = 15

    trainer.train_step = stopping
    return trainer.fit()


def rows(folder: Path) -> list[dict[str, Any]]:
    """The metric rows of training steps."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"] > 0]


def token_lags(run: Path) -> list[int]:
    """How many versions each run of trained tokens lagged that was drawn under one version."""
    return [
        step - 1 - version
        for step, group in recorded(run)
        if group["fate"] == "kept"
        for response in group["responses"]
        for version, _ in response["versions"]
    ]
