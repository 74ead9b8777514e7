"""`gspo config show` and `gspo config explain`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gspo.commands.arguments import PASS_THROUGH, load_arguments
from gspo.config.text.explain import explain as explain_key
from gspo.config.text.show import changed, to_yaml
from gspo.exit_codes import EXIT_REFUSED

app = typer.Typer(no_args_is_help=True, help="Show and explain the configuration.", add_completion=False)

Words = Annotated[
    list[str] | None, typer.Argument(metavar="[CONFIG] [KEY=VALUE …]", help="YAML file, overrides, --flags.")
]


@app.command(context_settings=PASS_THROUGH)
def show(
    arguments: Words = None,
    config: Annotated[Path | None, typer.Option("--config", help="YAML file.")] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Only what differs from the defaults.")] = False,
    origins: Annotated[bool, typer.Option(help="Say where each value came from.")] = True,
) -> None:
    """Print the resolved configuration, each value with its origin."""
    resolved = load_arguments(arguments or [], config)
    typer.echo(to_yaml(resolved, origins, only=changed(resolved) if diff else None), nl=False)


@app.command()
def explain(key: Annotated[str, typer.Argument(help="A key, a section, or another system's name.")]) -> None:
    """Say what a key means: type, default, choices, names in other systems."""
    text, known = explain_key(key)
    typer.echo(text, err=not known)
    if not known:
        raise typer.Exit(EXIT_REFUSED)
