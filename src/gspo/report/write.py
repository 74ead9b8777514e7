"""Writing a report into the run folder: report.html, plots/*.png and RUN.md."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

log = logging.getLogger("gspo.report")


@dataclass
class Report:
    """What was written; `notes` says what was left out and why."""

    page: Path
    card: Path
    pictures: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def write_report(run_dir: Path | str) -> Path:
    """Write the report of a run and return the page's path. Problems are logged, never raised: a run has ended well."""
    page = Path(run_dir) / "report.html"
    try:
        for note in build_report(run_dir).notes:
            log.info(note)
    except Exception as error:  # whatever goes wrong in a picture of the run must not fail the run
        log.warning(
            "%s could not be written: %s: %s; `gspo report %s` tries again", page, type(error).__name__, error, run_dir
        )
    return page


def build_report(run_dir: Path | str, *, pictures: bool = True, budget: int | None = None) -> Report:
    """Write the page, the run card and, when matplotlib is there, the pictures. Raises what goes wrong."""
    from gspo.report.overview import overview
    from gspo.report.page import report_page
    from gspo.report.rollout_store import DEFAULT_BUDGET, collect
    from gspo.report.run_card import run_card
    from gspo.runs.run import is_run, read_run

    path = Path(run_dir)
    if not is_run(path):
        raise FileNotFoundError(f"{path}: not a run folder; expected metrics.jsonl or config.yaml in it")
    run = read_run(path)
    store = collect(run, DEFAULT_BUDGET if budget is None else budget)
    report = Report(path / "report.html", path / "RUN.md")
    _write(report.page, report_page(overview(run), store.index, store.chunks, store.note))
    _write(report.card, run_card(run))
    if store.note:
        report.notes.append(store.note)
    if pictures:
        try:
            from gspo.report.pictures import draw_pictures
        except ImportError:
            report.notes.append("plots/*.png were left out: they need matplotlib; pip install 'gspo[report]'")
        else:
            report.pictures = draw_pictures(run, store.index, path / "plots")
    return report


def _write(path: Path, text: str) -> None:
    """Replace the file in one go, so that a reader never sees half a page."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_bytes(text.encode("utf-8", "replace"))
    os.replace(temporary, path)
