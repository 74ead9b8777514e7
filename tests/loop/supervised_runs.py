"""Running and stopping small supervised runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gspo.config import load_supervised
from gspo.loop.supervised import SupervisedTrainer
from gspo.runs.console import Console
from tests.loop.runs import fit

SMALL = (
    "trainer.experiment_name=run",
    "trainer.total_training_steps=4",
    "trainer.save_freq=1",
    "trainer.num_threads=1",
    "data.num_train_samples=64",
    "data.num_val_samples=16",
    "data.train_batch_size=8",
    "actor_rollout_ref.actor.optim.lr=1e-2",
)
LORA = ("actor_rollout_ref.model.lora_rank=4",)


def trainer(folder: Path, model: Path, *overrides: str, **options: Any) -> SupervisedTrainer:
    paths = (f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={folder}")
    return SupervisedTrainer(
        load_supervised(None, [*paths, *SMALL, *overrides]), console=Console(enabled=False), **options
    )


def train(folder: Path, model: Path, *overrides: str, stop_after: int | None = None, **options: Any) -> dict[str, Any]:
    """Train to the end, or to a stop after a step; the result."""
    return fit(trainer(folder, model, *overrides, **options), stop_after)
