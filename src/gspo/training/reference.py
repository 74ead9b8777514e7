"""The frozen reference policy, to which KL terms keep the policy close."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

from torch import Tensor

from gspo.training.policy import TokenScorer
from gspo.types import Batch, TrainBatch


class Reference:
    """Scores batches under frozen weights: those of a separate model, or the policy's base weights.

    In the second case `frozen` is a context that switches the policy's adapters off.
    """

    def __init__(
        self, scorer: TokenScorer, frozen: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext
    ) -> None:
        self.scorer = scorer
        self._frozen = frozen

    def log_probs(self, batch: TrainBatch) -> Tensor:
        """Log-probs [B,T] of the batch's responses."""
        with self._frozen():
            return self.scorer.log_probs(batch)[0]

    def score(self, batch: Batch) -> Batch:
        """The batch with `ref_log_probs`."""
        return dataclasses.replace(batch, ref_log_probs=self.log_probs(batch))
