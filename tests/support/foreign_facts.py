"""The settings of scripts and files of other systems, from the tables in tests/config/facts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FACTS = Path(__file__).parents[1] / "config" / "facts"


def settings_of(table: str) -> dict[str, list[str]]:
    """Name of a script or file → its settings as `key=value`."""
    head, _, body = (FACTS / table).read_text().partition("\n\n")
    names = dict(line.split(" ", 1) for line in head.splitlines() if not line.startswith("#"))
    found: dict[str, list[str]] = {name: [] for name in names.values()}
    for line in body.splitlines():
        numbers, setting = line.split(" ", 1)
        for number in numbers.split(","):
            found[names[number]].append(setting)
    return found


def as_tree(settings: list[str]) -> dict[str, Any]:
    """`a.b=value` as nested dictionaries, for a YAML file."""
    tree: dict[str, Any] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        *sections, last = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[last] = yaml.safe_load(value)
    return tree
