"""`gspo sft`: fine-tune a model on the answers of a dataset, before reinforcement learning."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from gspo.commands.arguments import PASS_THROUGH, ConfigFile, Words
from gspo.commands.supervised.options import Device, Epochs, MaxLength, NumSamples, Out, Rate, Seed, Steps, load_options
from gspo.runs.console import waiting

app = typer.Typer(add_completion=False)


@app.command(context_settings=PASS_THROUGH)
def sft(
    context: typer.Context,
    arguments: Words = None,
    config: ConfigFile = None,
    out: Out = None,
    model: Annotated[str | None, typer.Option(help="Folder, hub name, or embedded, the default.")] = None,
    data: Annotated[
        str | None, typer.Option(help="Dataset whose rows have answers; see gspo data list. Default: arithmetic.")
    ] = None,
    val_data: Annotated[
        str | None, typer.Option(help="Held-out dataset. Default: the held-out part of --data.")
    ] = None,
    steps: Steps = None,
    epochs: Epochs = None,
    lr: Rate = None,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Examples per step. Default: 64.")] = None,
    warmup_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of linear warm-up. Default: a twentieth of the steps.")
    ] = None,
    weight_decay: Annotated[float | None, typer.Option(min=0.0, help="Decoupled weight decay. Default: 0.01.")] = None,
    num_train_samples: NumSamples = None,
    max_length: MaxLength = None,
    answer_key: Annotated[str | None, typer.Option(help="Column of a file with the answers to imitate.")] = None,
    prompt_key: Annotated[str | None, typer.Option(help="Column with the question. Default: prompt.")] = None,
    seed: Seed = None,
    device: Device = None,
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
    resolved = load_options(context.params, arguments, config)
    with waiting("loading torch"):
        from gspo.distributed.launch import launch
        from gspo.loop.run import run_program
        from gspo.loop.supervised import SupervisedTrainer

    code = launch(resolved.config, ["-m", "gspo", *sys.argv[1:]])  # several ranks on this machine
    raise typer.Exit(run_program(resolved, SupervisedTrainer, out=out) if code is None else code)
