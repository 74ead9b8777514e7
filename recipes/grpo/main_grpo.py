"""GRPO with dynamic sampling: `python main_grpo.py [key=value …]`, on config/grpo.yaml."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gspo.commands.script_entry import train

CONFIG = Path(__file__).parent / "config" / "grpo.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; the exit code is that of `gspo train`."""
    return train(arguments, config=CONFIG)


if __name__ == "__main__":
    sys.exit(main())
