"""`gspo dashboard`: the live page for all runs of a folder."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Annotated

import typer

from gspo.commands import refuse

app = typer.Typer(add_completion=False)
NICENESS = 10  # training on the same machine goes first


@app.command()
def dashboard(
    runs_dir: Annotated[
        Path, typer.Argument(metavar="[RUNS_DIR]", help="The folder that contains the run folders.")
    ] = Path("runs"),
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 = any free port.")] = 6480,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Anyone who can reach it can read the runs.")
    ] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Show the runs of RUNS_DIR in the browser while they train.

    It only reads the run folders. Ctrl-C stops it.
    """
    from gspo.report.server import LOOPBACK, Dashboard

    if not runs_dir.is_dir():
        refuse(f"{runs_dir}: no such folder; give the folder with the runs, or start a run with `gspo train`")
    try:
        server = Dashboard(runs_dir, host, port)
    except OSError as error:
        refuse(f"cannot listen on {host}:{port} ({error.strerror}); choose another with --port, or --port 0")
    with contextlib.suppress(OSError):
        os.nice(NICENESS)
    typer.echo(f"dashboard of {runs_dir.resolve()} at {server.url} (Ctrl-C stops it)")
    if host not in LOOPBACK:
        typer.echo(f"warning: listening on {host}: everyone who can reach this address can read the runs", err=True)
    if open_browser:
        import webbrowser

        webbrowser.open(server.url)
    with contextlib.suppress(KeyboardInterrupt), server:
        server.serve_forever()
