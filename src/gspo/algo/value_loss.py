"""The critic's side of PPO: the clipped value loss and how much of the returns the values explain."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.algo.aggregation import aggregate
from gspo.metrics import Metric
from gspo.types import BatchTotals, LossOutput


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, clip: float, totals: BatchTotals
) -> LossOutput:
    """½·max((V-R)², (clip(V, V_old ± c)-R)²), a mean over the mini-batch's trained tokens. Tensors are [B,T].

    The clip holds a value near what it was before the step, as the policy's ratio is held near 1 (the pessimistic
    maximum of arXiv 1707.06347's reference implementation).
    """
    mask = mask.bool()
    target_BT = torch.where(mask, returns, 0.0)
    values_BT, old_BT = torch.where(mask, values, 0.0), torch.where(mask, old_values, 0.0)
    # Not old + clamp(value - old): that rounds values within the range too, and they would count as clipped.
    held_BT = values_BT.clamp(old_BT - clip, old_BT + clip)
    free_BT, clipped_BT = (values_BT - target_BT).square(), (held_BT - target_BT).square()
    loss = 0.5 * aggregate(torch.maximum(free_BT, clipped_BT), mask, totals, "token-mean")
    num_tokens = mask.sum()
    acted_BT = (clipped_BT > free_BT) & mask
    return LossOutput(
        loss,
        {
            "critic/vf_loss": Metric.mean(loss.detach(), num_tokens / max(totals.num_tokens, 1.0)),
            "critic/vf_clipfrac": Metric.mean(acted_BT.sum(), num_tokens),
            "critic/vpred_mean": Metric.mean(values_BT.detach().sum(), num_tokens),
        },
    )


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """1 - Var(R - V)/Var(R) over trained tokens: 1 is perfect, 0 a constant; 0 as well when the returns do not vary."""
    chosen = mask.bool()
    target = returns[chosen].double()
    if target.numel() < 2 or target.max() == target.min():
        return 0.0
    residual = target - values[chosen].double()
    return float(1.0 - residual.var(unbiased=False) / target.var(unbiased=False))
