"""`gspo doctor`: environment, objective, batch and memory plan, noise floor, and settings without effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from gspo.commands.arguments import PASS_THROUGH, ConfigFile, Words, load_arguments
from gspo.exit_codes import EXIT_DONE, EXIT_PROBLEM

if TYPE_CHECKING:
    from gspo.checks.doctor.doctor import Diagnosis
    from gspo.config import ResolvedConfig

app = typer.Typer(add_completion=False)


@app.command(context_settings=PASS_THROUGH)
def doctor(
    arguments: Words = None,
    config: ConfigFile = None,
    environment: Annotated[bool, typer.Option("--environment", help="Check only the environment.")] = False,
    no_model: Annotated[bool, typer.Option("--no-model", help="Skip the checks that load the weights.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Show what a config computes and needs, and whether it can work.

    Exits with code 1 when it finds a problem.
    """
    from gspo.checks.doctor.doctor import Diagnosis, examine_environment

    resolved = None if environment else load_arguments(arguments, config, show_warnings=False)
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
    from gspo.checks.doctor import doctor
    from gspo.loop.run import exit_code

    @contextmanager
    def examining(name: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if exit_code(error) is None and not isinstance(error, OSError | ValueError):
                raise
            diagnosis.problems.append(f"{name} could not be examined: {error}")

    with examining("sizes"):
        resolved = doctor.as_run(diagnosis, resolved)
    doctor.examine_config(diagnosis, resolved)
    with examining("chat template"):
        doctor.examine_template(diagnosis, resolved)
    with examining("memory"):
        doctor.examine_memory(diagnosis, resolved)
    with examining("experience"):
        doctor.examine_experience(diagnosis, resolved)
    if not no_model:
        with examining("quick sample"):
            doctor.examine_sample(diagnosis, resolved)
