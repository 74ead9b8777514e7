"""A training script's way in: the words after its name, and the exit code, as `gspo train` would have them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from gspo.commands.arguments import load_arguments
from gspo.commands.train import run
from gspo.openmp import choose_spin_count


def train(
    arguments: Sequence[str] | None = None, *, config: str | Path | None = None, recipe: str | Path | None = None
) -> int:
    """Train by the script's `config` (values, as if typed) or `recipe` (defaults that give way), then `arguments`.

    `--config FILE` among the arguments replaces `config`; `--dry-run` prints the plan. Returns the exit code.
    """
    choose_spin_count()
    words = list(sys.argv[1:] if arguments is None else arguments)
    path = _take_option(words, "--config") or config
    dry_run = "--dry-run" in words
    words = [word for word in words if word != "--dry-run"]
    try:
        resolved = load_arguments(words, None if path is None else Path(path), recipe=recipe, show_warnings=dry_run)
    except typer.Exit as stop:
        return stop.exit_code
    if dry_run:
        from gspo.config.text.dry_run import dry_run_text

        print(dry_run_text(resolved), end="")
        return 0
    return run(resolved)


def _take_option(words: list[str], name: str) -> str | None:
    """The value of `--name VALUE` or `--name=VALUE`, taken out of the words."""
    for index, word in enumerate(words):
        if word == name and index + 1 < len(words):
            value = words[index + 1]
            del words[index : index + 2]
            return value
        if word.startswith(f"{name}="):
            del words[index]
            return word.partition("=")[2]
    return None
