"""`gspo config show`, `gspo config explain` and `gspo config import`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gspo.commands import refuse
from gspo.commands.arguments import PASS_THROUGH, ConfigFile, Words, load_arguments
from gspo.config import ConfigErrors
from gspo.config.imports.importer import import_file
from gspo.config.text.explain import explain as explain_key
from gspo.config.text.show import changed, to_yaml
from gspo.exit_codes import EXIT_REFUSED
from gspo.runs.files import write_atomic

app = typer.Typer(no_args_is_help=True, help="Show and explain the configuration.", add_completion=False)


@app.command(context_settings=PASS_THROUGH)
def show(
    arguments: Words = None,
    config: ConfigFile = None,
    diff: Annotated[bool, typer.Option("--diff", help="Print only the keys that differ from the defaults.")] = False,
    origins: Annotated[bool, typer.Option(help="Print where each value comes from.")] = True,
) -> None:
    """Print the resolved configuration, each value with its origin."""
    resolved = load_arguments(arguments, config)
    typer.echo(to_yaml(resolved, origins, only=changed(resolved) if diff else None), nl=False)


@app.command("import")
def import_config(
    file: Annotated[
        Path,
        typer.Argument(metavar="FILE", help="A shell script of verl, a YAML file of AReaL or verl, or a Python file."),
    ],
    to: Annotated[Path | None, typer.Option("--to", help="Write the YAML here instead of printing it.")] = None,
) -> None:
    """Turn a configuration of another system into YAML, without running it. Comments say what differs."""
    try:
        text = import_file(file)
    except (ConfigErrors, OSError, SyntaxError) as error:
        refuse(error)
    if to is None:
        typer.echo(text, nl=False)
    elif to.exists():
        refuse(FileExistsError(f"{to} exists; choose another name, or remove it"))
    else:
        write_atomic(to, text.encode())
        typer.echo(f"written to {to}")


@app.command()
def explain(
    key: Annotated[
        str,
        typer.Argument(metavar="KEY", help="A key, its last part, a section, or the name of a key in another system."),
    ],
) -> None:
    """Explain a key: meaning, type, default, allowed values, names in other systems."""
    text, known = explain_key(key)
    typer.echo(text, err=not known)
    if not known:
        raise typer.Exit(EXIT_REFUSED)
