"""The options that commands on answers share, and the keys for which options are short."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from gspo.commands.arguments import load_arguments
from gspo.config import ResolvedConfig, load_supervised

KEYS = {
    "model": "actor_rollout_ref.model.path",
    "data": "data.train_files",
    "val_data": "data.val_files",
    "steps": "trainer.total_training_steps",
    "epochs": "trainer.total_epochs",
    "lr": "actor_rollout_ref.actor.optim.lr",
    "batch_size": "data.train_batch_size",
    "warmup_steps": "actor_rollout_ref.actor.optim.lr_warmup_steps",
    "weight_decay": "actor_rollout_ref.actor.optim.weight_decay",
    "num_train_samples": "data.num_train_samples",
    "max_length": "data.max_length",
    "answer_key": "data.response_key",
    "prompt_key": "data.prompt_key",
    "seed": "trainer.seed",
    "device": "trainer.device",
    "dtype": "actor_rollout_ref.model.dtype",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
}
Out = Annotated[
    Path | None, typer.Option(help="Folder to write the model to; must be new or empty. Default: only the run folder.")
]
Steps = Annotated[int | None, typer.Option(min=1, help="Optimiser steps. Default: 1000.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Passes over the data, instead of --steps.")]
Rate = Annotated[float | None, typer.Option(help="Peak learning rate of a cosine schedule. Default: 0.001.")]
NumSamples = Annotated[int | None, typer.Option(min=1, help="Use only the first N rows. Default: all.")]
MaxLength = Annotated[int | None, typer.Option(min=1, help="Longest prompt with answer, in tokens. Default: 2048.")]
Seed = Annotated[
    int | None, typer.Option(min=0, help="Seed of generated data and of the order of the rows. Default: 0.")
]
Device = Annotated[str | None, typer.Option(help="auto (a GPU if there is one), the default, cpu, cuda or cuda:N.")]


def load_options(options: Mapping[str, Any], arguments: list[str] | None, config: Path | None) -> ResolvedConfig:
    """The config of a run on answers, from the command's options by name and its other words."""
    wanted = [f"{key}={options[name]}" for name, key in KEYS.items() if options.get(name) is not None]
    return load_arguments([*wanted, *(arguments or [])], config, load=load_supervised, show_warnings=False)
