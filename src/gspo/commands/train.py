"""`gspo train`: check the configuration, then train; with `--dry-run` print the plan instead."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from gspo.commands.arguments import PASS_THROUGH, load_arguments
from gspo.config import ResolvedConfig

app = typer.Typer(add_completion=False)


@app.command(context_settings=PASS_THROUGH)
def train(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [KEY=VALUE …]", help="YAML file, overrides; any key or alias as --flag."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML file.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan and stop.")] = False,
) -> None:
    """Train a model. Without arguments: the embedded model learns arithmetic."""
    resolved = load_arguments(arguments or [], config, show_warnings=dry_run)  # a run shows them itself
    if dry_run:
        from gspo.config.text.dry_run import dry_run_text

        typer.echo(dry_run_text(resolved), nl=False)
        return
    raise typer.Exit(run(resolved))


def run(config: ResolvedConfig) -> int:
    """Train by a checked config; the exit code."""
    from gspo.distributed.launch import launch
    from gspo.loop.run import run_program

    code = launch(config.config, sys.argv[1:])  # several ranks on this machine
    return run_program(config) if code is None else code
