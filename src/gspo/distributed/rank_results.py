"""What a trainer rank sends back about its rows of a batch; the other ranks' rows are 0 in its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gspo.metrics import Metrics


@dataclass(frozen=True, slots=True)
class RankScores:
    """π_old and entropies [B,T] of one rank's rows; `unscored_rows` are those of them that its update will score."""

    old_log_probs: Tensor
    entropy: Tensor | None
    unscored_rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class FoundRows:
    """π_old and entropies [len(rows),T] of the rows that an update scored."""

    rows: list[int]
    log_probs: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True)
class RankUpdate:
    """One rank's part of an update: metrics and log-probs [B,T] of its rows, and what it found of unscored ones."""

    metrics: Metrics
    log_probs: Tensor
    found: FoundRows | None
