"""The result of a sweep: its runs from best to worst, each paired with the best, and the page that compares them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gspo.report import words
from gspo.report.comparison import compare_runs
from gspo.report.overview import overview
from gspo.report.page import compare_page
from gspo.report.verdict import held_out_scores
from gspo.runs.files import write_atomic
from gspo.runs.run import Run, is_run, read_run

CAUTION = (
    "The best run was chosen by these held-out questions, so its accuracy is a little too high: evaluate it on others "
    "before you report it."
)


def write_page(folder: Path, names: Sequence[str]) -> tuple[Path, dict[str, Any]] | None:
    """Write `sweep.html`, which compares the runs with the best one; its path and the comparison. None without runs."""
    runs = [read_run(folder / name) for name in names if is_run(folder / name)]
    if not runs:
        return None
    runs.sort(key=_score, reverse=True)  # stable: equal ones stay in the order of the file
    comparison = compare_runs(runs)
    page = folder / "sweep.html"
    write_atomic(page, compare_page(comparison, [overview(run) for run in runs]).encode("utf-8", "replace"))
    return page, comparison


def standings(comparison: dict[str, Any]) -> str:
    """A table in text: the best run first, the others with their difference to it over the same questions."""
    rows = [("run", "held-out", "95 % interval", "difference to the best, with 95 % interval")]
    for run, difference in zip(comparison["runs"], [None, *comparison["differences"]]):
        rows.append(
            (
                run["name"] if run["status"] == "finished" else f"{run['name']} ({run['status']})",
                _held_out(run),
                words.interval(*run["final_ci"]) if run["final_ci"] else "–",
                "" if difference is None else _difference(difference["paired"]),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return "\n".join([*lines, *([CAUTION] if len(rows) > 2 else [])])


def _held_out(run: dict[str, Any]) -> str:
    if run["final_acc"] is not None:
        return words.percent(run["final_acc"])
    return "–" if run["final_reward"] is None else f"reward {run['final_reward']:.3f}"


def _difference(paired: dict[str, Any] | None) -> str:
    if paired is None:
        return "no question in common"
    interval = f"{100 * paired['low']:+.1f} to {100 * paired['high']:+.1f}"
    return f"{words.points(paired['difference'])} ({interval}){'' if paired['clear'] else ', not clear'}"


def _score(run: Run) -> tuple[bool, float]:
    """What runs are ordered by: held-out accuracy, else reward; those without an evaluation come last."""
    known = held_out_scores(run)
    return bool(known), known[-1] if known else 0.0
