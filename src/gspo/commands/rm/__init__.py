"""`gspo rm`: train a reward model on preference pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gspo.commands import refuse
from gspo.commands.arguments import PASS_THROUGH, ConfigFile, Words, load_arguments
from gspo.config import load_supervised

app = typer.Typer(add_completion=False)

# Option → key.
KEYS = {
    "model": "actor_rollout_ref.model.path",
    "data": "data.train_files",
    "val_data": "data.val_files",
    "steps": "trainer.total_training_steps",
    "epochs": "trainer.total_epochs",
    "lr": "actor_rollout_ref.actor.optim.lr",
    "batch_size": "data.train_batch_size",
    "num_train_samples": "data.num_train_samples",
    "max_length": "data.max_length",
    "seed": "trainer.seed",
    "device": "trainer.device",
}


@app.command(context_settings=PASS_THROUGH)
def rm(
    context: typer.Context,
    arguments: Words = None,
    config: ConfigFile = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write the model to; must be new or empty. Default: only the run folder."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Decoder to start from: folder, hub name, or embedded, the default.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Rows with prompt, chosen and rejected; or arithmetic, the default.")
    ] = None,
    val_data: Annotated[str | None, typer.Option(help="Held-out pairs. Default: the held-out part of --data.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps. Default: 1000.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data, instead of --steps.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate of a cosine schedule. Default: 0.001.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Pairs per step. Default: 64.")] = None,
    num_train_samples: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N rows. Default: all.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt with answer, in tokens. Default: 2048.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of generated data and of the order of the rows. Default: 0.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto (a GPU if there is one), the default, cpu, cuda or cuda:N.")
    ] = None,
) -> None:
    """Train a reward model on preference pairs and save it as a classifier with one label.

    The loss is that of Bradley and Terry. Options are short for keys of gspo train; other keys are given as key=value. The
    run folder has metrics, checkpoints and a report; the same command continues a run that was stopped.
    """
    wanted = [f"{key}={context.params[name]}" for name, key in KEYS.items() if context.params[name] is not None]
    resolved = load_arguments([*wanted, *(arguments or [])], config, load=load_supervised, show_warnings=False)
    if resolved.config.actor_rollout_ref.actor.strategy != "local":
        refuse("actor_rollout_ref.actor.strategy: gspo rm trains on one device; remove it")
    if resolved.config.actor_rollout_ref.model.lora_rank:
        refuse("actor_rollout_ref.model.lora_rank: gspo rm trains all weights; remove it")
    from gspo.loop.preferences import RewardModelTrainer
    from gspo.loop.run import run_program

    raise typer.Exit(run_program(resolved, RewardModelTrainer, out=out))
