"""Words after a command → a checked config: `[CONFIG.yaml] [key=value …] [--flag value …]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from gspo.commands import refuse
from gspo.config import ConfigErrors, Problem, ResolvedConfig, load
from gspo.config.loading.flags import split_arguments, take_hydra_config
from gspo.exit_codes import EXIT_REFUSED
from gspo.registry import PluginError

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}
Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG] [KEY=VALUE …]",
        help="YAML file or recipe name, then overrides; any key or alias also as --flag.",
    ),
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file.")]


def load_arguments(
    arguments: Sequence[str] | None,
    config: Path | None = None,
    *,
    show_warnings: bool = True,
    load: Callable[..., ResolvedConfig] = load,
    **options: Any,
) -> ResolvedConfig:
    """The config that the words describe, loaded by `load` with these options.

    On errors, prints all of them and exits with code 2.
    """
    words, overrides, flags = split_arguments(arguments or ())
    hydra, flags = take_hydra_config(flags)
    if config is None and words:
        config = Path(words.pop(0))
    config = config or hydra
    problems = [
        Problem("error", word, None, "command line", "not understood", "write key=value, or --flag value")
        for word in words
    ]
    try:
        resolved = load(config, overrides, flags, **options)
    except ConfigErrors as errors:
        problems += errors.problems
        resolved = None
    except PluginError as error:  # of an installed package
        refuse(error)
    if resolved is None or problems:
        for problem in problems:
            typer.echo(str(problem), err=True)
        count = sum(p.level == "error" for p in problems)
        typer.echo(f"{count} error{'s' if count != 1 else ''} in the configuration; nothing was started", err=True)
        raise typer.Exit(EXIT_REFUSED)
    for warning in resolved.warnings if show_warnings else ():
        typer.echo(str(warning), err=True)
    return resolved
