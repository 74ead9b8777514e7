"""The entry point of training scripts: the same command line and exit codes as `gspo train`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from gspo.commands.train import run
from gspo.openmp import choose_spin_count


def train(
    arguments: Sequence[str] | None = None,
    *,
    config: str | Path | None = None,
    recipe: str | Path | None = None,
    system: str | None = None,
) -> int:
    """Train with the script's `config` or `recipe` and the `arguments` (default: the command line).

    Values of `config` count as set by the user, those of `recipe` as defaults. `--config FILE` among the arguments
    replaces `config`; `--dry-run` prints the plan. `system` is whose program the script replaces: what nobody sets has
    its default. Returns the exit code.
    """
    choose_spin_count()
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", type=Path, default=config and Path(config))
    parser.add_argument("--dry-run", action="store_true")
    options, words = parser.parse_known_args(arguments)
    try:
        program = [*_own_program(), *(sys.argv[1:] if arguments is None else arguments)]
        return run(words, options.config, options.dry_run, recipe, system=system, program=program)
    except typer.Exit as stop:
        return stop.exit_code


def _own_program() -> list[str]:
    """How torchrun starts this script again on several ranks: `-m MODULE`, or its file."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return [sys.argv[0]] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
