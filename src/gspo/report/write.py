"""Writing a report into the run folder: report.html, plots/*.png and RUN.md."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gspo.report.verdict import Verdict
from gspo.runs.files import write_atomic

log = logging.getLogger("gspo.report")
MAX_PROBLEMS = 20  # files of groups that are named


@dataclass
class Report:
    """The files of a report; `notes` says what was left out and why."""

    page: Path
    card: Path
    pictures: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    verdict: Verdict | None = None


def write_report(run_dir: Path | str, warn: Callable[[str], None] = log.warning) -> Path | None:
    """Write the report of a run and return the page's path. A failure is passed to `warn`, never raised: then None."""
    try:
        report = build_report(run_dir)
    except Exception as error:  # a finished run must not fail because its report does
        cause = f"{type(error).__name__}: {error}"
        warn(f"the report of {run_dir} is not complete: {cause}; `gspo report {run_dir}` writes it again")
        return None
    for note in report.notes:
        log.info(note)
    return report.page


def build_report(run_dir: Path | str, *, pictures: bool = True, budget: int | None = None) -> Report:
    """Write the page, the run card and, when matplotlib is installed, the pictures. Errors are raised."""
    from gspo.report.overview import overview
    from gspo.report.page import report_page
    from gspo.report.rollout_store import DEFAULT_BUDGET, collect
    from gspo.report.run_card import run_card
    from gspo.report.verdict import judge
    from gspo.runs.run import is_run, read_run

    path = Path(run_dir)
    if not is_run(path):
        raise FileNotFoundError(f"{path}: not a run folder; expected metrics.jsonl or config.yaml in it")
    run = read_run(path)
    store = collect(run, DEFAULT_BUDGET if budget is None else budget)
    report = Report(path / "report.html", path / "RUN.md", verdict=judge(run))
    problems = [*run.problems, *store.problems[:MAX_PROBLEMS]]
    if len(store.problems) > MAX_PROBLEMS:
        problems.append(f"{len(store.problems) - MAX_PROBLEMS} more files of groups")
    page = report_page({**overview(run), "problems": problems}, store.index, store.chunks, store.note)
    write_atomic(report.page, page.encode("utf-8", "replace"))
    write_atomic(report.card, run_card(run).encode("utf-8", "replace"))
    if store.note:
        report.notes.append(store.note)
    report.notes += [f"not read: {problem}" for problem in problems]
    if pictures:
        try:
            from gspo.report.pictures import draw_pictures
        except ImportError:
            report.notes.append("plots/*.png were left out: they need matplotlib; pip install 'gspo[report]'")
        else:
            report.pictures = draw_pictures(run, store.index, path / "plots")
    return report
