"""From per-token losses to one number, divided by counts of the whole mini-batch.

Every mode is a fixed weight on each token's loss. The weights depend on the row itself and on `BatchTotals`, never
on the micro-batch or the padding, so micro-batch losses and gradients add up to those of the mini-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.algo.ratios import sequence_lengths
from gspo.algo.settings import AGGREGATIONS
from gspo.types import BatchTotals


def count_totals(mask: Tensor, is_rollout: Tensor | None = None) -> BatchTotals:
    """The denominators of one mini-batch; sum them over ranks before use. Waits for the device.

    `is_rollout` [B] is False for branches, which count with their rollout; None: there are none.
    """
    lengths = mask.bool().sum(dim=-1)
    counted = lengths > 0 if is_rollout is None else (lengths > 0) & is_rollout
    return BatchTotals(num_tokens=float(lengths.sum()), num_sequences=float(counted.sum()))


def aggregate(
    loss_BT: Tensor, mask: Tensor, totals: BatchTotals, mode: str | None, norm_length: float | None = None
) -> Tensor:
    """Σ_it weight·loss over trained tokens; an empty sequence adds exactly 0."""
    mask = mask.bool()
    masked_BT = torch.where(mask, loss_BT, 0.0)
    num_tokens, num_sequences = max(totals.num_tokens, 1.0), max(totals.num_sequences, 1.0)
    if mode == "token-mean":
        return masked_BT.sum() / num_tokens
    if mode == "token-sum":
        return masked_BT.sum()
    if mode == "seq-mean-token-sum":
        return masked_BT.sum() / num_sequences
    if mode == "seq-mean-token-mean":
        return (masked_BT.sum(dim=-1, keepdim=True) / sequence_lengths(mask)).sum() / num_sequences
    if mode == "seq-mean-token-sum-norm":
        if norm_length is None:
            raise ValueError("loss_agg_mode=seq-mean-token-sum-norm needs norm_length, the fixed length to divide by")
        return masked_BT.sum() / (num_sequences * norm_length)
    raise ValueError(f"loss_agg_mode={mode!r}: expected one of {', '.join(AGGREGATIONS)}")
