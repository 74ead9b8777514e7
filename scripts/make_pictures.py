"""Make the pictures of the documentation from finished runs: report, dashboard, comparison, terminal, and plots.

    python scripts/make_pictures.py runs/NAME [--other runs/OTHER] [--out docs/pictures]

The terminal shows the rows of the run as `gspo train` prints them at 80 columns. `--other` is compared with the run.

Needs Chromium (on the path as `chromium`, or GSPO_CHROMIUM) and the packages of `pip install 'gspo[test]'`.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from rich.console import Console as RichConsole

from gspo.loop import ending
from gspo.report.comparison import compare_runs
from gspo.report.overview import overview
from gspo.report.page import compare_page
from gspo.report.server import Dashboard
from gspo.report.write import build_report
from gspo.runs.console import Console
from gspo.runs.folder import RunFolder
from gspo.runs.run import read_run

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
PLOTS = ("learning", "difficulty")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
    parser.add_argument("--other", type=Path, help="folder of a second run, for the comparison")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"))
    given = parser.parse_args()
    chromium = os.environ.get("GSPO_CHROMIUM") or shutil.which("chromium")
    if not chromium:
        sys.exit("error: no Chromium; apt-get install chromium, or set GSPO_CHROMIUM to its path")
    given.out.mkdir(parents=True, exist_ok=True)
    report = build_report(given.run)
    for plot in report.pictures:
        if plot.stem in PLOTS:
            shutil.copy(plot, given.out / plot.name)
    take_screenshots(report.page, given.run, given.other, given.out, chromium)
    for path in sorted(given.out.glob("*.png")):
        print(path)


def take_screenshots(page: Path, run: Path, other: Path | None, out: Path, chromium: str) -> None:
    """Report in both themes and on a phone, an opened group, the dashboard's list of runs, a terminal, a comparison."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver, Dashboard(run.resolve().parent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        shoot(browser, page.resolve().as_uri(), out / "report-light.png")
        shoot(browser, page.resolve().as_uri(), out / "report-dark.png", theme="dark")
        shoot(browser, page.resolve().as_uri(), out / "report-phone.png", width=390)
        shoot(browser, page.resolve().as_uri() + "#fate=kept", out / "rollouts.png", select="#rollouts")
        shoot(browser, server.url, out / "dashboard.png", height=420)
        shoot(browser, server.url, out / "dashboard-phone.png", width=390)
        shoot_terminal(browser, run, out / "terminal.png")
        if other is not None:
            shoot_comparison(browser, [run, other], out / "comparison.png")
        browser.close()
        server.shutdown()


def shoot_terminal(browser: Any, run: Path, path: Path) -> None:
    """What `gspo train` prints on a terminal of 80 columns, from the rows of a run."""
    folder = RunFolder(run)
    rows, result = list(folder.rows()), folder.result()
    console = Console(every=0)
    console.rich = RichConsole(record=True, force_terminal=True, width=80, highlight=False, file=io.StringIO())
    for row in rows:
        values = {name: value for name, value in row.items() if isinstance(value, int | float)}
        console.step(row["step"], rows[-1]["step"], values)
    if result is not None:
        ending.show_change(console, folder, result, num_examples=3)
    page = browser.new_context(viewport={"width": 1000, "height": 900}).new_page()
    page.route("**/*", lambda route: route.abort())  # the picture needs no fonts from a network
    page.set_content(console.rich.export_svg(title="gspo train"))
    page.locator("svg").first.screenshot(path=path)
    page.context.close()


def shoot_comparison(browser: Any, runs: list[Path], path: Path) -> None:
    """The page of `gspo compare`."""
    loaded = [read_run(run.resolve()) for run in runs]
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "compare.html"
        page.write_bytes(compare_page(compare_runs(loaded), [overview(run) for run in loaded]).encode())
        shoot(browser, page.as_uri(), path)


def shoot(
    browser: Any, url: str, path: Path, *, theme: str = "light", width: int = 1280, height: int = 900, select: str = ""
) -> None:
    """One picture of the top of a page, or of one part of it with its first group opened."""
    size = {"width": width, "height": height}
    context = browser.new_context(viewport=size, color_scheme=theme, device_scale_factor=2 if width < 600 else 1)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("html[data-ready=yes]")
    if path.stem.startswith(("report", "rollouts")):
        page.wait_for_selector("html[data-indexed=yes]")
    if path.stem.startswith("dashboard"):
        page.locator("p.note").first.evaluate("note => note.textContent = 'runs'")  # not the folder of this machine
    if select:
        page.click(f"{select} .row >> nth=0")
        page.wait_for_selector(f"{select} .response")
        page.locator(select).screenshot(path=path)
    else:
        page.wait_for_timeout(300)
        page.screenshot(path=path)
    context.close()


if __name__ == "__main__":
    main()
