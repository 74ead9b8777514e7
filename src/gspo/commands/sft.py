"""`gspo sft`: fine-tune a model on the answers of a dataset, before reinforcement learning."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from gspo.commands import refuse

app = typer.Typer(add_completion=False)


@app.command()
def sft(
    out: Annotated[Path, typer.Option(help="Folder to write the model to; must be new or empty.")],
    model: Annotated[str, typer.Option(help="Folder, hub name, or embedded.")] = "embedded",
    data: Annotated[str, typer.Option(help="Dataset whose rows have answers; see gspo data list.")] = "arithmetic",
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps.")] = 1000,
    lr: Annotated[float, typer.Option(help="Peak learning rate of a cosine schedule.")] = 1e-3,
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per step.")] = 64,
    warmup_steps: Annotated[
        int | None, typer.Option(min=0, help="Steps of linear warm-up. Default: a twentieth of the steps.")
    ] = None,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="Decoupled weight decay.")] = 0.01,
    num_train_samples: Annotated[
        int | None, typer.Option(min=1, help="Use only the first N rows. Default: all.")
    ] = None,
    max_length: Annotated[int, typer.Option(min=1, help="Longest prompt with answer, in tokens.")] = 2048,
    answer_key: Annotated[str | None, typer.Option(help="Column of a file with the answers to imitate.")] = None,
    prompt_key: Annotated[str, typer.Option(help="Column with the question.")] = "prompt",
    seed: Annotated[int, typer.Option(min=0, help="Seed of generated data and of the order of the rows.")] = 0,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Precision of computation: float32 or bfloat16.")] = "float32",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run Python code that comes with the model.")
    ] = False,
) -> None:
    """Fine-tune a model on the answers of a dataset and save a Hugging Face folder.

    The loss is on the answers only.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        refuse(f"--out {out}: exists and is not an empty folder; give a new one")
    if dtype not in ("float32", "bfloat16"):
        refuse(f"--dtype {dtype}: expected float32 or bfloat16")
    from gspo.data.columns import Columns
    from gspo.data.datasets import load_rows

    try:
        # Rows need a text to imitate, but no ground truth.
        columns = Columns(prompt_key=prompt_key, answer_key=answer_key, ground_truth_key=None)
        rows = load_rows(data, limit=num_train_samples, seed=seed, columns=columns)
        from gspo.training.sft import ProgressLine, SftConfig, warm_start

        result = warm_start(
            model,
            rows,
            out,
            SftConfig(
                steps,
                lr,
                batch_size,
                warmup_steps=warmup_steps,
                weight_decay=weight_decay,
                max_length=max_length,
                seed=seed,
            ),
            device=_device(device),
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            on_step=ProgressLine(steps, lambda line: print(line, file=sys.stderr, flush=True)),
        )
    except ValueError as error:
        refuse(error)
    typer.echo(f"result: {json.dumps(dataclasses.asdict(result))}")


def _device(name: str) -> str:
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"
