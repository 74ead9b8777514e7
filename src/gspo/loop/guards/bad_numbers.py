"""Bad numbers: what a step's metrics say of its updates, and when they must stop the run."""

from __future__ import annotations

from collections.abc import Callable

from gspo.types import Metrics

RATIO_LIMIT = 100.0  # a mean sequence ratio beyond this is an explosion, not a policy
IN_A_ROW = "bad_steps_in_row"


class BadNumbers(RuntimeError):
    """Non-finite updates in a row, or a ratio explosion: the run stops rather than train on noise."""


def check_numbers(
    step: int, metrics: Metrics, counters: dict[str, float], limit: int, warn: Callable[[str], None]
) -> None:
    """Count steps in a row whose updates were skipped in `counters`; BadNumbers at the limit, or when a ratio explodes."""
    skipped = [metrics.get(f"{role}/skipped_updates") for role in ("actor", "critic")]
    bad = any(s is not None and s.result() > 0 for s in skipped)
    counters[IN_A_ROW] = counters[IN_A_ROW] + 1 if bad else 0
    if bad:
        kinds = [k for k in ("loss", "gradient") if f"actor/nonfinite_{k}" in metrics] or ["critic loss"]
        warn(f"step {step}: non-finite {' and '.join(kinds)}; those updates were skipped")
    if counters[IN_A_ROW] >= limit:
        raise BadNumbers(
            f"non-finite updates in {counters[IN_A_ROW]} steps in a row "
            "(trainer.max_skipped_steps); weights are those before them. Lower actor.optim.lr, or use float32"
        )
    ratio = metrics.get("actor/seq_importance_ratio/max")
    if ratio is not None and not (ratio.result() <= RATIO_LIMIT):
        raise BadNumbers(
            f"step {step}: sequence ratio {ratio.result():.3g} exceeds {RATIO_LIMIT:g}; the policy has left "
            "the one that generated. Lower actor.optim.lr or use fewer mini-batches a step"
        )
