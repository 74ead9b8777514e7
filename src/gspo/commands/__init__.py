"""The subcommands of `gspo`, a module each. `gspo.cli` finds them by name and imports only the one that is run."""

from __future__ import annotations

from typing import NoReturn

import typer

from gspo.exit_codes import EXIT_REFUSED


def refuse(message: object, code: int = EXIT_REFUSED) -> NoReturn:
    """Print an error and exit: how every command ends that cannot do what was asked."""
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(code)
