"""The documentation: every page is in the navigation, every link leads somewhere, and the site builds strictly."""

from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
TEXTS = [*PAGES, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "AGENTS.md"))]
ITEM = re.compile(r"([-*]|\d+\.) ")
# The dialect that the pages were once written in: rates with an article instead of "per".
RATES = re.compile(
    r"\b(tokens?|prompts?|responses?|answers?|groups?|steps?|bytes|programs?|requests?|rows?|failures|seconds|s|ms)"
    r" an? (second|minute|day|step|prompt|question|group|token|row|run|rank|core|layer|parameter|response|answer|"
    r"micro-batch|mini-batch|batch)\b"
)


def prose(path: Path) -> str:
    """The text of a page with its code blocks and comments left out."""
    text = re.sub(r"^(```+)[^\n]*\n.*?^\1$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)


def nav_files(entry: Any) -> list[str]:
    """The files that a navigation tree names, in order."""
    if isinstance(entry, str):
        return [entry]
    children = entry.values() if isinstance(entry, dict) else entry
    return [file for child in children for file in nav_files(child)]


def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as the site makes them."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.+)$", prose(path), flags=re.MULTILINE):
        plain = re.sub(r"[`*]|\[([^]]*)\]\([^)]*\)", r"\1", title)
        found.add(re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain, flags=re.ASCII).strip().lower()))
    return found


def test_every_page_is_in_the_navigation_once():
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(nav_files(config["nav"])) == [page.relative_to(DOCS).as_posix() for page in PAGES]


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_and_anchors_resolve(path):
    text = re.sub(r"`[^`\n]*`", "", prose(path))
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    for target in (t for t in targets if not t.startswith(("http://", "https://"))):
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.is_file(), f"{path.name} links to {target}, which is not there"
        if anchor:
            assert anchor in anchors(linked), f"{path.name} links to {target}; {linked.name} has no such heading"


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_lists_and_tables_follow_an_empty_line(path):
    """The site's Markdown, unlike GitHub's, takes a list or table that directly follows a paragraph for a part of it."""
    lines = prose(path).splitlines()
    for before, line in pairwise(lines):
        inside_list = ITEM.match(before.lstrip()) or before.startswith("  ") or not before.strip()
        assert not ITEM.match(line) or inside_list, f"{path.name}: {line!r} needs an empty line before it"
        inside_table = before.startswith("|") or not before.strip()
        assert not line.startswith("|") or inside_table, f"{path.name}: {line!r} needs an empty line before it"


@pytest.mark.parametrize("path", TEXTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_rates_are_written_with_per(path):
    found = [match.group() for match in RATES.finditer(prose(path))]
    assert not found, f"{path.name}: write per in {found}"


class Loaded(HTMLParser):
    """Collects the addresses of what a page loads: scripts, style sheets, pictures, frames."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.addresses.append(given["src"] or "")
        if tag == "link" and given.get("rel") in ("stylesheet", "preconnect", "icon", "preload"):
            self.addresses.append(given.get("href") or "")


def test_the_site_builds_strictly_and_loads_nothing_from_a_network(tmp_path):
    pytest.importorskip("mkdocs", reason="pip install 'gspo[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    built = sorted(tmp_path.rglob("*.html"))
    assert len(built) >= len(PAGES)
    for page in built:
        loaded = Loaded()
        loaded.feed(page.read_text(encoding="utf-8"))
        outside = [a for a in loaded.addresses if re.match(r"(https?:)?//", a)]
        assert loaded.addresses and not outside, f"{page.name} loads {outside}"
