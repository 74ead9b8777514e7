"""An existing training script with the trainer class exchanged: the one changed line is the import.

It trains on the Ray cluster of RAY_ADDRESS or a local one; without Ray in this process.

python examples/main_grpo.py algorithm.filter_groups.enable=True data.train_batch_size=32 actor_rollout_ref.rollout.n=5
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from gspo.config import load
from gspo.trainer.ppo import RayPPOTrainerWithSampling as RayPPOTrainer


def main(arguments: Sequence[str]) -> dict[str, Any]:
    """Train as the `key=value` arguments say; the result."""
    trainer = RayPPOTrainer(config=load(overrides=list(arguments)))
    return trainer.fit()


if __name__ == "__main__":
    print(main(sys.argv[1:]))
