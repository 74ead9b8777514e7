"""`gspo train`: check the configuration, then train; with `--dry-run` print what it would compute instead."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gspo.commands import refuse
from gspo.commands.arguments import PASS_THROUGH, ConfigFile, Words, load_arguments
from gspo.config import ResolvedConfig
from gspo.config.text.dry_run import dry_run_text
from gspo.data.rows import DataError, HubDataError
from gspo.exit_codes import EXIT_DONE
from gspo.plugins import import_plugins
from gspo.runs.console import waiting

if TYPE_CHECKING:
    from gspo.build.sizes import Sizes

app = typer.Typer(add_completion=False)


@app.command(context_settings=PASS_THROUGH)
def train(
    arguments: Words = None,
    config: ConfigFile = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Print what would be computed and which settings have no effect, then stop."),
    ] = False,
) -> None:
    """Train a model by a YAML file or a named recipe. Without arguments, the embedded model learns arithmetic."""
    raise typer.Exit(run(arguments, config, dry_run))


def run(
    arguments: Sequence[str] | None,
    config: Path | None,
    dry_run: bool,
    recipe: str | Path | None = None,
    *,
    system: str | None = None,
    program: Sequence[str] | None = None,
) -> int:
    """Train with the config that the words describe, or print what it would compute. Returns the exit code.

    `program` are the words with which torchrun starts this program again where several ranks train.
    """
    # A run shows the warnings itself.
    resolved = load_arguments(arguments, config, recipe=recipe, system=system, show_warnings=dry_run)
    if dry_run:
        return _print_plan(resolved)
    with waiting("loading torch"):
        from gspo.distributed.launch import launch
        from gspo.loop.run import run_program

    code = launch(resolved.config, program or ["-m", "gspo", *sys.argv[1:]])  # several ranks on this machine
    return run_program(resolved) if code is None else code


def _print_plan(resolved: ResolvedConfig) -> int:
    """Print what the run would compute. Returns the exit code: bad rows and too little memory are refused as in a run.

    What cannot be read here, such as a model on a hub that is not reachable, is said and not checked.
    """
    with waiting("checking the data and the memory"):
        sizes, memory, refused = _check_sizes(resolved)
    typer.echo(dry_run_text(sizes.resolved, memory, [*sizes.notes, *sizes.warnings]), nl=False)
    if refused is not None:
        refuse(refused)
    return EXIT_DONE


def _check_sizes(resolved: ResolvedConfig) -> tuple[Sizes, str, Exception | None]:
    """The sizes that a run would choose, its memory in words, and the error with which it would be refused."""
    from gspo.build.memory import in_words
    from gspo.build.sizes import NotEnoughMemory, Sizes, decide_sizes
    from gspo.loop.run import exit_code

    sizes, memory, refused = Sizes(resolved), "", None
    try:
        import_plugins(resolved.config.trainer.plugins)
        sizes = decide_sizes(resolved)
        if sizes.memory is not None:
            plan = sizes.memory
            memory = f"about {in_words(plan.peak)} of {in_words(plan.available)}, most in {plan.memory.peak_stage}"
    except NotEnoughMemory as error:
        refused = error
    except Exception as error:
        if exit_code(error) is None:
            raise
        is_elsewhere = isinstance(error, HubDataError)
        is_row = isinstance(error, DataError) and not is_elsewhere and not error.where.startswith("data.")
        memory, refused = ("not checked", error) if is_row else (f"not checked: {error}", None)
    return sizes, memory, refused
