"""`gspo config show` and `gspo config explain`."""

from __future__ import annotations

from typing import Annotated

import typer

from gspo.commands.arguments import PASS_THROUGH, ConfigFile, Words, load_arguments
from gspo.config.text.explain import explain as explain_key
from gspo.config.text.show import changed, to_yaml
from gspo.exit_codes import EXIT_REFUSED

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
