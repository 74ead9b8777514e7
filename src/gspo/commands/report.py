"""`gspo report`: the page, the pictures and the run card of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gspo.commands import refuse

app = typer.Typer(add_completion=False)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The run's folder, such as runs/embedded.")],
    pictures: Annotated[bool, typer.Option(help="Also draw plots/*.png.")] = True,
    max_mb: Annotated[int, typer.Option(min=1, help="Most MB of group files to embed in the page.")] = 32,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict and the files written as JSON.")] = False,
) -> None:
    """Write the report of a run.

    The files are RUN/report.html (complete in itself, no network needed), RUN/plots/*.png and RUN/RUN.md.
    """
    import json
    from dataclasses import asdict

    from gspo.report.write import build_report

    try:
        done = build_report(run, pictures=pictures, budget=max_mb << 20)
    except FileNotFoundError as error:
        refuse(error)
    verdict = done.verdict
    assert verdict is not None
    if as_json:
        files = {"page": str(done.page), "card": str(done.card), "pictures": [str(p) for p in done.pictures]}
        typer.echo(
            json.dumps({"verdict": asdict(verdict), "files": files, "notes": done.notes}, indent=1, ensure_ascii=False)
        )
        return
    typer.echo(verdict.headline)
    for sentence in verdict.sentences:
        typer.echo(sentence)
    typer.echo(f"page      {done.page}\nrun card  {done.card}")
    if done.pictures:
        typer.echo(f"pictures  {done.pictures[0].parent} ({len(done.pictures)})")
    for note in done.notes:
        typer.echo(f"note: {note}")
