"""`gspo compare`: results, paired differences and config differences of two or more runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from gspo.commands import refuse

app = typer.Typer(add_completion=False)


@app.command()
def compare(
    runs: Annotated[
        list[Path], typer.Argument(metavar="A B [C…]", help="Run folders. The others are compared with the first.")
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON, curves included.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write a page with curves over steps, tokens and time.")] = None,
) -> None:
    """Compare runs: final accuracy over the same questions, cost, and the settings that differ."""
    import json

    from gspo.report.comparison import compare_runs
    from gspo.report.overview import overview
    from gspo.report.page import compare_page
    from gspo.runs.files import write_atomic
    from gspo.runs.run import is_run, read_run

    bad = [str(path) for path in runs if not is_run(path)]
    if bad or len(runs) < 2:
        refuse(f"{', '.join(bad)}: not a run folder" if bad else "one run is not enough; give two or more")
    loaded = [read_run(path.resolve()) for path in runs]
    comparison = compare_runs(loaded)
    if html is not None:
        write_atomic(html, compare_page(comparison, [overview(run) for run in loaded]).encode("utf-8", "replace"))
    if as_json:
        typer.echo(json.dumps(comparison, indent=1, ensure_ascii=False, default=str))
        return
    _print(comparison)
    if html is not None:
        typer.echo(f"page: {html}")


def _print(comparison: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from gspo.report import words

    console = Console(highlight=False)
    letters = [_letter(i) for i in range(len(comparison["runs"]))]  # names may be longer than a terminal is wide
    for letter, run in zip(letters, comparison["runs"]):
        console.print(Text(f"{letter}  {run['name']}"))
    table = Table(title="Runs", title_justify="left", padding=(0, 1 if console.width > 90 else 0))
    for title in ("run", "steps", "start", "end", "95 % interval", "tokens", "wasted", "time"):
        table.add_column(title, justify="left" if title == "run" else "right", no_wrap=True)
    for letter, run in zip(letters, comparison["runs"]):
        cells = [
            letter,
            str(run["steps"]),
            _or_dash(run["start_acc"], words.percent),
            _or_dash(run["final_acc"], words.percent),
            words.interval(*run["final_ci"]) if run["final_ci"] else "–",
            _or_dash(run["generated_tokens"], words.count),
            _or_dash(run["wasted_share"], lambda v: words.percent(v, 0)),
            _or_dash(run["seconds"], words.duration),
        ]
        table.add_row(*(Text(cell) for cell in cells))
    console.print(table)
    for sentence in comparison["sentences"]:
        console.print(Text(sentence))
    for run in comparison["runs"]:
        for problem in run["problems"]:
            console.print(Text(f"{run['name']}: not read: {problem}"))
    if not comparison["config"]:
        console.print("The configs are the same.")
        return
    table = Table(title="Config differences", title_justify="left")
    for title in ("key", *letters):
        table.add_column(Text(title), overflow="fold")
    for row in comparison["config"]:
        values = ["–" if v["missing"] else words.name_of(v["value"]) for v in row["values"]]
        table.add_row(Text(row["key"]), *(Text(v) for v in values))
    console.print(table)


def _letter(number: int) -> str:
    """A, B, …, Z, A2, B2, …"""
    return chr(ord("A") + number % 26) + (str(number // 26 + 1) if number >= 26 else "")


def _or_dash(value: Any, form: Any) -> str:
    return "–" if value is None else form(value)
