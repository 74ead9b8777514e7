"""Generated parts of a documentation page: Markdown tables, between marks that the page holds."""

from __future__ import annotations

import sys
from pathlib import Path


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def replaced(page: Path, bodies: dict[str, str]) -> str:
    """The page with every part between `<!-- name -->` and `<!-- /name -->` replaced by the body of that name."""
    text = page.read_text(encoding="utf-8")
    for name, body in bodies.items():
        begin, end = f"<!-- {name} -->\n\n", f"\n\n<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            sys.exit(f"error: {page} has no part {name}; expected {begin.strip()} … {end.strip()}")
        text = before + begin + body + end + after
    return text
