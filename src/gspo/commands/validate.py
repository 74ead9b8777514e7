"""`gspo validate`: check the installed program by its numbers and by short trainings."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def validate(
    quick: Annotated[bool, typer.Option("--quick", help="Only the technical part: a few seconds.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every check as JSON.")] = False,
) -> None:
    """Check technical correctness, training dynamics, improvement and clip ranges. About two minutes; exits 1 on failure."""
    from gspo.checks.validate import report

    raise typer.Exit(report(quick=quick, as_json=as_json))
