"""GSPO from flags alone: `python train_gspo.py --dataset mixed --num_train_samples 50 --num_epochs 3`.

Defaults are in train_gspo.yaml and give way to any flag; `key=value` sets any key of the program.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import checkout  # noqa: F401 - first, for a program that is not installed

from gspo.commands.script_entry import train

DEFAULTS = Path(__file__).parent / "train_gspo.yaml"


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; the exit code is that of `gspo train`."""
    return train(arguments, recipe=DEFAULTS)


if __name__ == "__main__":
    sys.exit(main())
