"""Mixture-of-experts models: the share of routed experts that an update changes, on a sample of the batch.

Expert choices that differ between rollout and update make token ratios jump, so token-level losses need routing replay;
GSPO's sequence ratio averages over the jumps (arXiv 2507.18071, section 5.3).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gspo.metrics import Metric, Metrics
from gspo.training.batch.batching import micro_batch
from gspo.training.parallel.ranks import ALONE, Ranks
from gspo.types import TrainBatch

MAX_SEQUENCES = 8


def experts_per_token(model: Any) -> int | None:
    """Number of experts per token; None for a model without a router."""
    config = model.config.get_text_config()
    if getattr(config, "num_experts", None) is None and getattr(config, "num_local_experts", None) is None:
        return None
    return getattr(config, "num_experts_per_tok", None)


class RouterWatch:
    """Compares the experts chosen before and after an update."""

    def __init__(self, model: Any, ranks: Ranks = ALONE) -> None:
        self.model, self._ranks = model, ranks
        self.num_chosen = experts_per_token(model)

    @contextmanager
    def watching(self, batch: TrainBatch) -> Iterator[Metrics]:
        """A context for an update. Afterwards its metrics have `actor/router_change`; they are empty without a router."""
        metrics: Metrics = {}
        if self.num_chosen is None:
            yield metrics
            return
        before = self.choices(batch)
        yield metrics
        after = self.choices(batch)
        metrics["actor/router_change"] = Metric.mean(float((before & ~after).sum()), float(before.sum()))

    @torch.no_grad()
    def choices(self, batch: TrainBatch) -> Tensor:
        """The experts of every real token of the batch's first sequences, bool [layers, tokens, experts]."""
        found = self._ranks.run(self._choices, batch)
        self._ranks.rest()
        return found

    def _choices(self, batch: TrainBatch) -> Tensor:
        assert self.num_chosen is not None
        rows = list(range(min(MAX_SEQUENCES, batch.num_sequences)))
        micro = micro_batch(batch, rows, next(self.model.parameters()).device)
        lengths = torch.tensor([len(batch.prompt_ids[r]) + len(batch.response_ids[r]) for r in rows])
        real = torch.arange(micro.input_ids.shape[1])[None] < lengths[:, None]
        out = self.model.base_model(input_ids=micro.input_ids, use_cache=False, output_router_logits=True)
        scores = torch.stack([layer.reshape(real.numel(), -1).cpu() for layer in out.router_logits])
        chosen = scores.topk(self.num_chosen, dim=-1).indices
        routed = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, chosen, True)
        return routed[:, real.flatten()]
