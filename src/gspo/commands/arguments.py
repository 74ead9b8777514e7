"""Words after a command → a checked config: `[CONFIG.yaml] [key=value …] [--flag value …]`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import typer

from gspo.config import ConfigErrors, Problem, ResolvedConfig, load
from gspo.config.loading.flags import split_arguments
from gspo.exit_codes import EXIT_REFUSED

PASS_THROUGH = {"allow_extra_args": True, "ignore_unknown_options": True}


def load_arguments(
    arguments: Sequence[str],
    config: Path | None = None,
    *,
    recipe: str | Path | None = None,
    show_warnings: bool = True,
) -> ResolvedConfig:
    """The config that the words ask for. Everything wrong with it is printed at once, and exit code 2 follows."""
    words, overrides, flags = split_arguments(arguments)
    if config is None and words:
        config = Path(words.pop(0))
    problems = [
        Problem("error", word, None, "command line", "not understood", "write key=value, or --flag value")
        for word in words
    ]
    try:
        resolved = load(config, overrides, flags, recipe=recipe)
    except ConfigErrors as errors:
        problems += errors.problems
        resolved = None
    if resolved is None or problems:
        _fail(problems)
    for warning in resolved.warnings if show_warnings else ():
        typer.echo(str(warning), err=True)
    return resolved


def _fail(problems: Sequence[Problem]) -> NoReturn:
    for problem in problems:
        typer.echo(str(problem), err=True)
    count = sum(p.level == "error" for p in problems)
    typer.echo(f"{count} error{'s' if count != 1 else ''} in the configuration; nothing was started", err=True)
    raise typer.Exit(EXIT_REFUSED)
