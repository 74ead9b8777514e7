"""`gspo sft`: warm-start a model on the answers of a dataset."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from gspo.exit_codes import EXIT_REFUSED

app = typer.Typer(add_completion=False)


@app.command()
def sft(
    out: Annotated[Path, typer.Option("--out", help="Folder to write the model to; must be new or empty.")],
    model: Annotated[str, typer.Option("--model", help="Folder, hub name, or embedded.")] = "embedded",
    data: Annotated[
        str, typer.Option("--data", help="Dataset whose rows have answers; see gspo data list.")
    ] = "arithmetic",
    steps: Annotated[int, typer.Option("--steps", min=1)] = 1000,
    lr: Annotated[float, typer.Option("--lr", help="Peak learning rate; cosine with warm-up.")] = 1e-3,
    batch_size: Annotated[int, typer.Option("--batch-size", min=1, help="Examples a step.")] = 64,
    warmup_steps: Annotated[
        int | None, typer.Option("--warmup-steps", min=0, help="Default: a twentieth of the steps.")
    ] = None,
    weight_decay: Annotated[float, typer.Option("--weight-decay", min=0.0)] = 0.01,
    num_train_samples: Annotated[
        int | None, typer.Option("--num-train-samples", min=1, help="Use only the first so many rows.")
    ] = None,
    max_length: Annotated[
        int, typer.Option("--max-length", min=1, help="Longest prompt with answer, in tokens.")
    ] = 2048,
    answer_key: Annotated[
        str | None, typer.Option("--answer-key", help="Column of a file with the text to imitate.")
    ] = None,
    prompt_key: Annotated[str, typer.Option("--prompt-key", help="Column with the question.")] = "prompt",
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1 …")] = "auto",
    dtype: Annotated[str, typer.Option("--dtype", help="What the model computes in: float32 or bfloat16.")] = "float32",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the model.")
    ] = False,
) -> None:
    """Imitate the answers of a dataset, with a loss on the answers only, and save an ordinary Hugging Face folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        _fail(f"--out {out}: exists and is not an empty folder; give a new one")
    if dtype not in ("float32", "bfloat16"):
        _fail(f"--dtype {dtype}: expected float32 or bfloat16")
    from gspo.data.columns import Columns
    from gspo.data.datasets import load_rows

    try:
        # A text to imitate is all that is needed, so no right answer is asked for.
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
        _fail(str(error))
    typer.echo(f"result: {json.dumps(dataclasses.asdict(result))}")


def _device(name: str) -> str:
    import torch

    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def _fail(message: str) -> NoReturn:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(EXIT_REFUSED)
