"""Bad numbers: updates that were skipped because they were not finite, and when they stop the run."""

from __future__ import annotations

from collections.abc import Callable

from gspo.metrics import Metrics

RATIO_LIMIT = 100.0  # a mean sequence ratio beyond this is an explosion, not a policy


class BadNumbers(RuntimeError):
    """Non-finite updates in a row, or a ratio explosion: the run stops rather than train on noise."""


def skipped_updates(metrics: Metrics) -> bool:
    """Whether updates of a step were skipped because of bad numbers."""
    skipped = [metrics.get(f"{role}/skipped_updates") for role in ("actor", "critic")]
    return any(s is not None and s.result() > 0 for s in skipped)


def check_numbers(step: int, metrics: Metrics, bad_in_row: int, limit: int, warn: Callable[[str], None]) -> None:
    """Warn of skipped updates; BadNumbers when `bad_in_row` such steps reach the limit, or when a ratio explodes."""
    if bad_in_row:
        kinds = [k for k in ("loss", "gradient") if f"actor/nonfinite_{k}" in metrics] or ["critic loss"]
        warn(f"step {step}: non-finite {' and '.join(kinds)}; those updates were skipped")
    if bad_in_row >= limit:
        raise BadNumbers(
            f"non-finite updates in {bad_in_row} steps in a row "
            "(trainer.max_skipped_steps); weights are those before them. Lower actor.optim.lr, or use float32"
        )
    ratio = metrics.get("actor/seq_importance_ratio/max")
    if ratio is not None and not (ratio.result() <= RATIO_LIMIT):
        raise BadNumbers(
            f"step {step}: sequence ratio {ratio.result():.3g} exceeds {RATIO_LIMIT:g}; the policy has left "
            "the one that generated. Lower actor.optim.lr or use fewer mini-batches a step"
        )
