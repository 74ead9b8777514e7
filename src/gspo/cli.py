"""The command line: the list of subcommands, each imported from `gspo.commands` when it is run."""

from __future__ import annotations

import difflib
import errno
import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from gspo import __version__
from gspo.exit_codes import EXIT_FILE
from gspo.openmp import choose_spin_count

CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EFBIG, errno.EIO)
# Each is a module under gspo.commands that has a `typer.Typer` called `app`.
COMMANDS = (
    "train",
    "branch",
    "recipes",
    "eval",
    "sft",
    "rm",
    "config",
    "data",
    "rewards",
    "env",
    "validate",
    "doctor",
    "replay",
    "report",
    "dashboard",
    "compare",
    "sweep",
    "plan",
    "serve",
    "chat",
    "generate",
    "push",
)
# Of commands that are not directly under gspo.commands.
FOLDERS = {
    **dict.fromkeys(("sft", "rm"), "supervised"),
    **dict.fromkeys(("serve", "chat", "generate", "push"), "serving"),
}


class LazyGroup(TyperGroup):
    """A command group that imports the module of a subcommand only when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        near = difflib.get_close_matches(args[0], COMMANDS, n=1) if args else []
        if near and args[0] not in COMMANDS:
            ctx.fail(f"No such command {args[0]!r}. Did you mean {near[0]}?")
        return super().resolve_command(ctx, args)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        folder = f"{FOLDERS[cmd_name]}." if cmd_name in FOLDERS else ""
        app = importlib.import_module(f"gspo.commands.{folder}{cmd_name}").app
        command = get_command(app)
        command.name = cmd_name
        return command


app = typer.Typer(
    cls=LazyGroup,
    name="gspo",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Post-train language models on verifiable rewards with GSPO and dynamic sampling.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gspo {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Post-train language models on verifiable rewards with GSPO and dynamic sampling."""


def main() -> None:
    """Entry point of the `gspo` program."""
    choose_spin_count()
    try:
        app()
    except OSError as error:
        if error.errno not in CANNOT_WRITE:
            raise
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_FILE)
