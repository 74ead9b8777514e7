"""`gspo rm`: train a reward model on preference pairs."""

from __future__ import annotations

from typing import Annotated

import typer

from gspo.commands import refuse
from gspo.commands.arguments import PASS_THROUGH, ConfigFile, Words
from gspo.commands.supervised.options import Device, Epochs, MaxLength, NumSamples, Out, Rate, Seed, Steps, load_options

app = typer.Typer(add_completion=False)


@app.command(context_settings=PASS_THROUGH)
def rm(
    context: typer.Context,
    arguments: Words = None,
    config: ConfigFile = None,
    out: Out = None,
    model: Annotated[
        str | None, typer.Option(help="Decoder to start from: folder, hub name, or embedded, the default.")
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="Rows with prompt, chosen and rejected; a run folder, for pairs of its answers; or arithmetic, the "
            "default."
        ),
    ] = None,
    val_data: Annotated[
        str | None, typer.Option(help="Held-out pairs. Default: the held-out part of --data; 0.05 of a run.")
    ] = None,
    steps: Steps = None,
    epochs: Epochs = None,
    lr: Rate = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Pairs per step. Default: 64.")] = None,
    num_train_samples: NumSamples = None,
    max_length: MaxLength = None,
    seed: Seed = None,
    device: Device = None,
) -> None:
    """Train a reward model on preference pairs and save it as a classifier with one label.

    The loss is that of Bradley and Terry. Options are short for keys of gspo train; other keys are given as key=value.
    The run folder has metrics, checkpoints and a report; the same command continues a run that was stopped.
    """
    resolved = load_options(context.params, arguments, config)
    if resolved.config.actor_rollout_ref.actor.strategy != "local":
        refuse("actor_rollout_ref.actor.strategy: gspo rm trains on one device; remove it")
    if resolved.config.actor_rollout_ref.model.lora_rank:
        refuse("actor_rollout_ref.model.lora_rank: gspo rm trains all weights; remove it")
    from gspo.loop.preferences import RewardModelTrainer
    from gspo.loop.run import run_program

    raise typer.Exit(run_program(resolved, RewardModelTrainer, out=out))
