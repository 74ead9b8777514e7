"""Make the pictures of the README from a finished run: screenshots of its report and dashboard, and its plots.

    python scripts/make_pictures.py runs/NAME [--out docs/pictures]

Needs Chromium (on the path as `chromium`, or GSPO_CHROMIUM) and the packages of `pip install 'gspo[test]'`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import threading
from pathlib import Path
from typing import Any

from gspo.report.server import Dashboard
from gspo.report.write import build_report

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
PLOTS = ("learning", "difficulty")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="folder of a finished run")
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
    take_screenshots(report.page, given.run, given.out, chromium)
    for path in sorted(given.out.glob("*.png")):
        print(path)


def take_screenshots(page: Path, run: Path, out: Path, chromium: str) -> None:
    """Report in both themes and on a phone, an opened group, and the dashboard's list of runs."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver, Dashboard(run.resolve().parent) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        shoot(browser, page.resolve().as_uri(), out / "report-light.png")
        shoot(browser, page.resolve().as_uri(), out / "report-dark.png", theme="dark")
        shoot(browser, page.resolve().as_uri(), out / "report-phone.png", width=390)
        shoot(browser, page.resolve().as_uri() + "#fate=kept", out / "rollouts.png", select="#rollouts")
        shoot(browser, server.url, out / "dashboard.png", height=420)
        browser.close()
        server.shutdown()


def shoot(
    browser: Any, url: str, path: Path, *, theme: str = "light", width: int = 1280, height: int = 900, select: str = ""
) -> None:
    """One picture of the top of a page, or of one part of it with its first group opened."""
    size = {"width": width, "height": height}
    context = browser.new_context(viewport=size, color_scheme=theme, device_scale_factor=2 if width < 600 else 1)
    page = context.new_page()
    page.goto(url)
    page.wait_for_selector("html[data-ready=yes]")
    if "dashboard" not in path.name:
        page.wait_for_selector("html[data-indexed=yes]")
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
