"""Whether a tag may be released: it is the version of pyproject.toml, and the changelog has a section for it."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def problems(tag: str, root: Path = ROOT) -> list[str]:
    """What is wrong with releasing `tag`; nothing when it may be released."""
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    found = []
    if tag != f"v{version}":
        found.append(f"the tag is {tag}, but pyproject.toml has version {version}")
    if not re.search(rf"^## {re.escape(version)}\b", (root / "CHANGELOG.md").read_text(), re.MULTILINE):
        found.append(f"CHANGELOG.md has no section '## {version}'; rename 'Unreleased'")
    return found


if __name__ == "__main__":
    wrong = problems(sys.argv[1])
    print("\n".join(wrong) or f"{sys.argv[1]} may be released")
    raise SystemExit(bool(wrong))
