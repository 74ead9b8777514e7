"""`gspo data show` and `gspo data list`: what a dataset holds, as the model will see it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from gspo.commands import refuse
from gspo.data.columns import Columns
from gspo.data.datasets import dataset_names, load_rows
from gspo.data.rows import DataError, Row, visible

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Look at datasets.")


@app.command("list")
def list_names() -> None:
    """Print the names that `data.train_files` accepts besides files and hub names."""
    for name in dataset_names():
        typer.echo(name)
    typer.echo("reasoning_gym:TASK[,key=value…]")


@app.command()
def show(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="Built-in name, file, pattern of files, folder of save_to_disk, or hub name."
        ),
    ],
    n: Annotated[int, typer.Option(min=1, help="Rows to print.")] = 3,
    split: Annotated[str, typer.Option(help="train or val.")] = "train",
    seed: Annotated[int, typer.Option(help="Seed of generated datasets.")] = 0,
    model: Annotated[str, typer.Option(help="Model whose tokenizer and chat template are used.")] = "embedded",
    limit: Annotated[int | None, typer.Option(min=1, help="Read and check only this many rows.")] = None,
    system_prompt: Annotated[str | None, typer.Option(help="System message for rows that have none.")] = None,
    prompt_key: Annotated[str, typer.Option(help="Column with the question.")] = "prompt",
    ground_truth_key: Annotated[
        str, typer.Option(help="Column with the correct answer; '' = none is needed.")
    ] = "reward_model.ground_truth",
    data_source_key: Annotated[str, typer.Option(help="Column that selects the reward.")] = "data_source",
) -> None:
    """Read and check all rows, then print the first ones as the model will see them."""
    if split not in ("train", "val"):
        raise typer.BadParameter(f"{split!r}; expected train or val", param_hint="--split")
    columns = Columns(prompt_key, ground_truth_key, data_source_key)
    try:
        rows = load_rows(
            name,
            split,  # pyright: ignore[reportArgumentType]
            limit=limit,
            seed=seed,
            columns=columns,
            system_prompt=system_prompt,
            say=lambda text: typer.echo(visible(text)),
        )
        _print_rows(rows, rows[:n], model)
    except DataError as error:
        refuse(visible(str(error)))


def _print_rows(rows: Sequence[Row], shown: Sequence[Row], model: str) -> None:
    from gspo.data.chat_template import encode_prompt
    from gspo.models.load import ModelError, load_tokenizer

    try:
        tokenizer = load_tokenizer(model)
    except ModelError as error:
        refuse(visible(f"--model {error}"))
    sources = sorted({row.data_source for row in rows})
    source = "no data_source" if sources == ["unknown"] else f"data_source {visible(', '.join(sources))}"
    typer.echo(f"{len(rows)} row{'s' * (len(rows) != 1)}, {source}; prompts as {model} sees them")
    for row in shown:
        prompt = encode_prompt(row, tokenizer)
        typer.echo(f"\n--- {visible(row.uid)}  ({visible(row.data_source)}, {len(prompt.token_ids)} tokens)")
        typer.echo(visible(tokenizer.decode(list(prompt.token_ids))))
        typer.echo(f"ground_truth: {_short(row.ground_truth)}")
        if row.answer is not None:
            typer.echo(f"answer: {_short(row.answer)}")
        if row.extra:
            typer.echo(f"extra: {_short(dict(row.extra))}")


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=repr)
    return visible(text if len(text) <= 400 else f"{text[:397]}...")
