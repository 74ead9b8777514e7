"""GSPO under AReaL's names: `python gsm8k_gspo.py --config gsm8k_gspo.yaml [key=value …]`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from gspo.commands.script_entry import train

CONFIG = Path(__file__).with_name("gsm8k_gspo.yaml")


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; the exit code is that of `gspo train`."""
    return train(arguments, config=CONFIG)


if __name__ == "__main__":
    sys.exit(main())
