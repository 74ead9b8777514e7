"""How a command ends when it cannot do what was asked."""

from __future__ import annotations

from typing import NoReturn

import typer

from gspo.exit_codes import EXIT_REFUSED


def refuse(message: object, code: int = EXIT_REFUSED) -> NoReturn:
    """Print an error and exit."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
