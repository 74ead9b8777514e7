"""verl's entry point: `python -m gspo.trainer.main_ppo key=value …` in place of `python -m verl.trainer.main_ppo`.

It is `gspo train` with verl's defaults: the loss is vanilla (PPO and GRPO) unless the arguments name another.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gspo.commands.script_entry import train


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; the exit code is that of `gspo train`."""
    return train(arguments, system="verl")


if __name__ == "__main__":
    sys.exit(main())
