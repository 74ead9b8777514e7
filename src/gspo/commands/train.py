"""`gspo train`: check the configuration, then train; with `--dry-run` print what it would compute instead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gspo.commands.arguments import PASS_THROUGH, ConfigFile, Words, load_arguments
from gspo.exit_codes import EXIT_DONE

app = typer.Typer(add_completion=False)


@app.command(context_settings=PASS_THROUGH)
def train(
    arguments: Words = None,
    config: ConfigFile = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be computed and which settings have no effect, then stop."),
    ] = False,
) -> None:
    """Train a model. Without arguments, the embedded model learns arithmetic."""
    raise typer.Exit(run(arguments, config, dry_run))


def run(
    arguments: Sequence[str] | None,
    config: Path | None,
    dry_run: bool,
    recipe: str | Path | None = None,
    *,
    system: str | None = None,
    program: Sequence[str] | None = None,
) -> int:
    """Train with the config that the words describe, or print what it would compute. Returns the exit code.

    `program` are the words with which torchrun starts this program again where several ranks train.
    """
    # A run shows the warnings itself.
    resolved = load_arguments(arguments, config, recipe=recipe, system=system, show_warnings=dry_run)
    if dry_run:
        from gspo.config.text.dry_run import dry_run_text

        typer.echo(dry_run_text(resolved), nl=False)
        return EXIT_DONE
    from gspo.distributed.launch import launch
    from gspo.loop.run import run_program

    code = launch(resolved.config, program or ["-m", "gspo", *sys.argv[1:]])  # several ranks on this machine
    return run_program(resolved) if code is None else code
