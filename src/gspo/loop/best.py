"""The best steps of a run by its held-out figures, and when a run that no longer improves ends.

Both follow from the metric rows alone, so a resumed run decides as an uninterrupted one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gspo.config.schema.trainer import EarlyStopConfig
from gspo.runs.metric_names import held_out_score, held_out_source, incomplete_sources

Row = Mapping[str, Any]
LOSSES = ("loss", "perplexity")  # ends of names of metrics that should fall


def held_out_figure(row: Row, metric: str | None = None) -> float | None:
    """What a row is judged by, larger is better: held-out accuracy, else reward, else minus the loss; or a named metric.

    None where the figure is of a data source with fewer than half of its rewards.
    """
    incomplete = incomplete_sources(row)
    if incomplete and (metric is None or held_out_source(metric) in incomplete):
        return None
    if metric is None:
        score = held_out_score(row)
        return score if score is not None else held_out_figure(row, "val/loss")
    value = row.get(metric)
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return -value if metric.endswith(LOSSES) else value


def best_steps(rows: Iterable[Row], count: int, among: Iterable[int] | None = None) -> list[int]:
    """The steps with the `count` best held-out figures, the best first; of equal ones the earlier."""
    allowed = None if among is None else set(among)
    figures = [(row["step"], held_out_figure(row)) for row in rows if allowed is None or row["step"] in allowed]
    known = [(step, figure) for step, figure in figures if figure is not None]
    return [step for step, _ in sorted(known, key=lambda pair: (-pair[1], pair[0]))[:count]]


def why_stop(rows: Sequence[Row], settings: EarlyStopConfig) -> str | None:
    """A sentence when the last `patience` evaluations did not improve on the best before; None otherwise."""
    known = [(row["step"], figure) for row in rows if (figure := held_out_figure(row, settings.metric)) is not None]
    if not settings.patience or len(known) <= settings.patience:
        return None
    best_step, best = known[0]
    since = 0
    for step, figure in known[1:]:
        if figure > best + settings.min_delta:
            best_step, best, since = step, figure, 0
        else:
            since += 1
    if since < settings.patience:
        return None
    name = settings.metric or "the held-out figure"
    return (
        f"{name} has not improved in {since} evaluation{'s' * (since != 1)} since step {best_step} ({abs(best):.3f}): the "
        f"run ends early (trainer.early_stop.patience={settings.patience})"
    )
