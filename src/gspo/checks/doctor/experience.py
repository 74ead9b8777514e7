"""Where a config leaves what was seen to work on real models (docs/results.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gspo.config import TrainerConfig

SMALLEST = 100_000_000
"""Parameters from which the results on pretrained models are taken to apply; the embedded models are far below."""

STEADY_LR, UNSTEADY_LR, BROKEN_LR = 1e-6, 3e-6, 1e-5
"""GSM8K, 0.5B, all weights trained, four optimiser steps per step, 100 steps."""


def departures(config: TrainerConfig, num_parameters: Callable[[], int]) -> Iterator[str]:
    """A sentence for each setting outside what was seen to work, for models that the results apply to."""
    lr = config.actor_rollout_ref.actor.optim.lr
    if lr < UNSTEADY_LR or config.actor_rollout_ref.model.lora_rank or num_parameters() < SMALLEST:
        return
    seen = {UNSTEADY_LR: "rose first and fell back after 60 steps", BROKEN_LR: "broke the model within 20 steps"}
    nearest = BROKEN_LR if lr >= BROKEN_LR else UNSTEADY_LR
    yield (
        f"actor.optim.lr={lr:g}: {nearest:g} {seen[nearest]}, {STEADY_LR:g} rose for 100 steps "
        "(GSM8K with 0.5B parameters; docs/results.md)"
    )
