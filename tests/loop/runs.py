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
    t = trainer(folder, model, *overrides, reward=reward)
    step = t.train_step

    def stopping() -> None:
        step()
        if stop_after is not None and t.step >= stop_after:
            t.stop.signal = 15

    t.train_step = stopping
    return t.fit()


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
