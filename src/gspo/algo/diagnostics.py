"""Metrics of a policy loss. They are sums with their counts, so micro-batches and ranks merge to the whole batch.

Nothing here waits for the device: values stay 0-dim tensors until `Metric.result()`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.algo.decoupled import BehaviourWeight
from gspo.algo.ratios import TOKEN_LOG_RATIO_LIMIT, masked_log_ratio, sequence_lengths, sequence_ratio
from gspo.metrics import Metric, Metrics
from gspo.types import LossInputs


@dataclass(frozen=True, slots=True)
class ClipBand:
    """Where a loss stops rewarding change: below `floor` for A < 0, above `ceiling` for A > 0.

    `position` is the clipped quantity ([B,T] or [B,1]): the ratio, or the log-ratio for a clip in log space. `dual` is
    the bound beyond which a dual clip holds the loss of A < 0, None without one.
    """

    position: Tensor
    floor: float
    ceiling: float
    count_sequences: bool
    dual: float | None = None


@torch.no_grad()
def policy_metrics(x: LossInputs, loss: Tensor, band: ClipBand, weight: BehaviourWeight | None = None) -> Metrics:
    """The metrics every policy loss reports, under the same names."""
    num_tokens = x.mask.sum()
    metrics = {
        # A mean with weights that add to 1 over a mini-batch: micro-batches add up, mini-batches average.
        "actor/pg_loss": Metric.mean(loss.detach(), num_tokens / max(x.totals.num_tokens, 1.0)),
        "actor/ppo_kl": Metric.mean(-_clamped_log_ratio(x).sum(), num_tokens),
    }
    metrics |= clip_metrics(x, band)
    metrics |= sequence_ratio_metrics(x)
    if weight is not None:
        metrics |= behaviour_metrics(x, weight)
    return metrics


def clip_metrics(x: LossInputs, band: ClipBand) -> Metrics:
    """Fractions beyond the band on the side where the advantage's sign makes the clip act.

    With `count_sequences` each sequence counts once whatever its length (by the share of its tokens beyond the band,
    which is 0 or 1 when its advantage is the same on every token); otherwise each token does.
    """
    upper_BT = (x.advantages > 0) & (band.position > band.ceiling) & x.mask
    lower_BT = (x.advantages < 0) & (band.position < band.floor) & x.mask
    either_BT = upper_BT | lower_BT

    def fraction(hit_BT: Tensor) -> Metric:
        if not band.count_sequences:
            return Metric.mean(hit_BT.sum(), x.mask.sum())
        per_sequence = hit_BT.sum(dim=-1, keepdim=True).to(x.log_probs.dtype) / sequence_lengths(x.mask)
        return Metric.mean(per_sequence.sum(), x.mask.any(dim=-1).sum())

    metrics = {
        "actor/pg_clipfrac": fraction(either_BT),
        "actor/pg_clipfrac_lower": fraction(lower_BT),
        "actor/pg_clipfrac_upper": fraction(upper_BT),
        "actor/pg_clipfrac_token": Metric.mean(either_BT.sum(), x.mask.sum()),
    }
    if band.dual is not None:
        metrics["actor/pg_clipfrac_dual"] = fraction((x.advantages < 0) & (band.position > band.dual) & x.mask)
    return metrics


def sequence_ratio_metrics(x: LossInputs) -> Metrics:
    """Mean, least and greatest sequence ratio s_i over sequences with trained tokens."""
    ratio_B = sequence_ratio(masked_log_ratio(x.log_probs, x.old_log_probs, x.mask), x.mask).squeeze(-1)
    present_B = x.mask.any(dim=-1)
    name = "actor/seq_importance_ratio"
    return {
        name: Metric.mean(torch.where(present_B, ratio_B, 0.0).sum(), present_B.sum()),
        f"{name}/min": Metric("min", _extreme(ratio_B, present_B, smallest=True)),
        f"{name}/max": Metric("max", _extreme(ratio_B, present_B, smallest=False)),
    }


def behaviour_metrics(x: LossInputs, weight: BehaviourWeight) -> Metrics:
    """Weights after the cap, the greatest before it, the share it acted on, and KL(μ ‖ π_old) sampled under μ."""
    assert x.rollout_log_probs is not None
    num_tokens = x.mask.sum()
    raw_BT, applied_BT = weight.raw.expand(x.mask.shape), weight.applied.expand(x.mask.shape)
    drift_BT = masked_log_ratio(x.rollout_log_probs, x.old_log_probs, x.mask)
    return {
        "actor/behav_imp_weight": Metric.mean(torch.where(x.mask, applied_BT, 0.0).sum(), num_tokens),
        "actor/behav_imp_weight/max": Metric("max", _extreme(raw_BT, x.mask, smallest=False)),
        "actor/behav_capped_frac": Metric.mean((weight.capped & x.mask).sum(), num_tokens),
        "actor/behav_kl": Metric.mean(drift_BT.sum(), num_tokens),
    }


def entropy_metric(entropy_BT: Tensor, mask: Tensor) -> Metrics:
    """`actor/entropy`, always a mean over trained tokens, whatever the loss's aggregation."""
    mask = mask.bool()
    return {"actor/entropy": Metric.mean(torch.where(mask, entropy_BT.detach(), 0.0).sum(), mask.sum())}


def _clamped_log_ratio(x: LossInputs) -> Tensor:
    log_ratio_BT = masked_log_ratio(x.log_probs, x.old_log_probs, x.mask)
    return log_ratio_BT.clamp(-TOKEN_LOG_RATIO_LIMIT, TOKEN_LOG_RATIO_LIMIT)


def _extreme(values: Tensor, present: Tensor, *, smallest: bool) -> Tensor:
    """Min or max where `present`; the neutral infinity when nothing is, so that merging stays right."""
    neutral = float("inf") if smallest else float("-inf")
    filled = torch.where(present, values, neutral).reshape(-1)
    padded = torch.cat([filled, filled.new_full((1,), neutral)])
    return padded.min() if smallest else padded.max()
