"""docs/architecture.md shows the import order that tests/test_layers.py checks."""

from __future__ import annotations

import re
from pathlib import Path

from tests.test_layers import ALLOWED, BASE, rooms

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"


def section(title: str) -> str:
    text = PAGE.read_text(encoding="utf-8")
    return re.split(r"^## ", text.partition(f"\n## {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def rows(title: str) -> list[list[str]]:
    """The cells of the table in a section, its header left out."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_import_table_is_that_of_the_layer_test():
    shown = {
        package: set(re.findall(r"`(\w+)`", allowed))
        for packages, allowed in rows("The import order")
        for package in re.findall(r"`(\w+)`", packages)
    }
    assert shown == ALLOWED
    assert all(f"`{name}`" in section("The import order") for name in BASE)


def test_every_package_has_its_question():
    shown = {name for cell, _ in rows("The packages") for name in re.findall(r"`(\w+)(?:/|\.py)`", cell)}
    assert shown == rooms() - {"__init__", "__main__"}


def test_the_files_it_names_exist():
    source = Path(__file__).parents[2] / "src" / "gspo"
    named = set(re.findall(r"`((?:\w+/)*\w+\.py)`", PAGE.read_text(encoding="utf-8")))
    named -= {"tests/test_layers.py"}
    assert named and not [name for name in named if not (source / name).is_file()]
