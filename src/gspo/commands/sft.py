"""`gspo sft`: fine-tune a model on the answers of a dataset, before reinforcement learning."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

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


@app.command(context_settings=PASS_THROUGH)
def sft(
    context: typer.Context,
    arguments: Words = None,
    config: ConfigFile = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder to write the model to; must be new or empty. Default: only the run folder."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Folder, hub name, or embedded, the default.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Dataset whose rows have answers; see gspo data list. Default: arithmetic.")
    ] = None,
    val_data: Annotated[
        str | None, typer.Option(help="Held-out dataset. Default: the held-out part of --data.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps. Default: 1000.")] = None,
    epochs: Annotated[int | None, typer.Option(min=1, help="Passes over the data, instead of --steps.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate of a cosine schedule. Default: 0.001.")] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Examples per step. Default: 64.")] = None,
    warmup_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of linear warm-up. Default: a twentieth of the steps.")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(min=0.0, help="Decoupled weight decay. Default: 0.01.")] = None,
    num_train_samples: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N rows. Default: all.")
    ] = None,
    max_length: Annotated[
        int | None, typer.Option(min=1, help="Longest prompt with answer, in tokens. Default: 2048.")
    ] = None,
    answer_key: Annotated[str | None, typer.Option(help="Column of a file with the answers to imitate.")] = None,
    prompt_key: Annotated[str | None, typer.Option(help="Column with the question. Default: prompt.")] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of generated data and of the order of the rows. Default: 0.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="auto (a GPU if there is one), the default, cpu, cuda or cuda:N.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="Precision of computation: float32, bfloat16, or auto (bfloat16 on a GPU), the default."),
    ] = None,
    trust_remote_code: Annotated[
        bool | None, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = None,
) -> None:
    """Fine-tune a model on the answers of a dataset and save a Hugging Face folder.

    The loss is on the answers only. Options are short for keys of gspo train; other keys are given as key=value. The
    run folder has metrics, checkpoints and a report; the same command continues a run that was stopped.
    """
    wanted = [f"{key}={context.params[name]}" for name, key in KEYS.items() if context.params[name] is not None]
    resolved = load_arguments([*wanted, *(arguments or [])], config, load=load_supervised, show_warnings=False)
    from gspo.distributed.launch import launch
    from gspo.loop.run import run_program
    from gspo.loop.supervised import SupervisedTrainer

    code = launch(resolved.config, ["-m", "gspo", *sys.argv[1:]])  # several ranks on this machine
    raise typer.Exit(run_program(resolved, SupervisedTrainer, out=out) if code is None else code)
