"""`gspo doctor`: environment, formula, batch and memory plan, noise floor, and what can never act."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gspo.commands.arguments import PASS_THROUGH, load_arguments
from gspo.exit_codes import EXIT_DONE, EXIT_PROBLEM

if TYPE_CHECKING:
    from gspo.checks.doctor.doctor import Diagnosis
    from gspo.config import ResolvedConfig

app = typer.Typer(add_completion=False)


@app.command(context_settings=PASS_THROUGH)
def doctor(
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [KEY=VALUE …]", help="As for gspo train."),
    ] = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML file.")] = None,
    environment: Annotated[bool, typer.Option("--environment", help="Only the environment.")] = False,
    no_model: Annotated[bool, typer.Option("--no-model", help="Leave out what needs the weights.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the facts as JSON.")] = False,
) -> None:
    """Say what a config will compute and need, and whether it can work. Exits 1 when a problem is found."""
    from gspo.checks.doctor.doctor import Diagnosis, examine_environment

    resolved = None if environment else load_arguments(arguments or [], config, show_warnings=False)
    diagnosis = Diagnosis()
    examine_environment(diagnosis)
    if resolved is not None:
        _examine(diagnosis, resolved, no_model)
    if as_json:
        typer.echo(json.dumps({**diagnosis.facts, "problems": diagnosis.problems}, ensure_ascii=False))
    else:
        typer.echo(diagnosis.text(), nl=False)
    raise typer.Exit(EXIT_PROBLEM if diagnosis.problems else EXIT_DONE)


def _examine(diagnosis: Diagnosis, resolved: ResolvedConfig, no_model: bool) -> None:
    from gspo.checks.doctor.doctor import examine_config, examine_memory, examine_sample
    from gspo.loop.run import exit_code

    examine_config(diagnosis, resolved)
    for examine in (examine_memory, *(() if no_model else (examine_sample,))):
        try:
            examine(diagnosis, resolved)
        except Exception as error:
            if exit_code(error) is None and not isinstance(error, OSError | ValueError):
                raise
            print(f"{examine.__name__.removeprefix('examine_')}: {error}", file=sys.stderr)
            diagnosis.problems.append(
                f"{examine.__name__.removeprefix('examine_')} could not be examined: {error}"
            )
