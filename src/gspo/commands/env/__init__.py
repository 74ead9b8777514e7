"""`gspo env list`, `gspo env show` and `gspo env try`."""

from __future__ import annotations

import inspect
import json
from typing import Annotated

import typer

from gspo.commands import refuse

app = typer.Typer(no_args_is_help=True, help="List, show and try environments.", add_completion=False)

Name = Annotated[
    str,
    typer.Argument(
        help="A built-in environment, a registered name, textarena:ID, mcp:…, openenv:URL, or file.py:Class."
    ),
]
Plugins = Annotated[list[str] | None, typer.Option("--plugin", help="File or module that registers environments.")]
Kwargs = Annotated[str, typer.Option(help="Arguments of the environment, as JSON.")]


@app.command("list")
def list_environments(plugin: Plugins = None) -> None:
    """List the environments, built-in and of plugins."""
    from gspo.environments.loading import ENVIRONMENTS
    from gspo.plugins import import_plugins
    from gspo.registry import PluginError

    try:
        import_plugins(plugin or ())
    except PluginError as error:
        refuse(error)
    for name in ENVIRONMENTS.names():
        summary = (inspect.getdoc(ENVIRONMENTS.get(name)) or "").partition("\n")[0]
        typer.echo(f"{name:12s} {summary}")


@app.command()
def show(name: Name, plugin: Plugins = None, kwargs: Kwargs = "{}") -> None:
    """Show what an environment is, its arguments, its tools and how the model calls them."""
    from gspo.commands.env.play import find, open_environment
    from gspo.environments.protocol import EnvironmentProblem
    from gspo.registry import PluginError

    try:
        found, made = open_environment(find(name, plugin or (), kwargs))
    except (EnvironmentProblem, PluginError) as error:
        refuse(error)
    typer.echo(inspect.getdoc(found) or "no description")
    typer.echo(f"arguments  {inspect.signature(found) if callable(found) else 'none'}")
    typer.echo(f"format     {getattr(made, 'tool_format', None) or ('auto' if made.tools else 'no tools')}")
    for tool in made.tools:
        typer.echo(json.dumps(tool, ensure_ascii=False, indent=2))
    made.close()


@app.command("try")
def try_environment(
    name: Name,
    task: Annotated[
        str | None, typer.Option(help="Dataset of the row: a name or a file. Default: of the environment's name.")
    ] = None,
    row: Annotated[int, typer.Option(min=0, help="Which row, counted from 0.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the episode.")] = 0,
    model: Annotated[str | None, typer.Option(help="Folder or hub name of a model that plays; else you do.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="With --model: longest rollout.")] = 512,
    plugin: Plugins = None,
    kwargs: Kwargs = "{}",
) -> None:
    """Play one episode in the terminal: by hand, one line per turn, or with a model."""
    from gspo.commands.env.play import find, load_row, play_by_hand, play_with_model
    from gspo.data.rows import DataError
    from gspo.environments.protocol import EnvironmentProblem
    from gspo.models import ModelError
    from gspo.registry import PluginError

    try:
        spec = find(name, plugin or (), kwargs)
        prompt = load_row(task or name.partition(":")[0], row, is_given=task is not None)
        if model is None:
            play_by_hand(spec, prompt, seed)
        else:
            play_with_model(spec, prompt, seed, model, max_tokens)
    except (DataError, EnvironmentProblem, PluginError, ModelError) as error:
        refuse(error)
