"""The three plain entry points, kept stable for users: tensors in, tensors and floats out."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gspo.algo.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from gspo.algo.aggregation import count_totals
from gspo.algo.kl import kl_estimate
from gspo.algo.losses import get_policy_loss
from gspo.algo.settings import Behaviour, LossSettings, length_weighting_note
from gspo.metrics import Metric, Metrics
from gspo.types import BatchTotals, LossInputs


def compute_policy_loss(
    loss_mode: str,
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    *,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_ratio_c: float | None = 3.0,
    loss_agg_mode: str | None = None,
    rollout_log_probs: Tensor | None = None,
    behav_imp_weight_cap: float | None = None,
    behav_imp_weight_mode: str = "token_mask",
    totals: BatchTotals | None = None,
    loss_norm_length: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """The loss (with gradient) and its metrics as floats. Tensors are [B,T]; advantages [B] or [B,T].

    `rollout_log_probs` switches the decoupled loss on. Without `totals` the tensors are taken as the whole mini-batch.
    `loss_norm_length` is the fixed length of `seq-mean-token-sum-norm`, 1 when not given.
    """
    _require_shapes(log_probs, old_log_probs=old_log_probs, response_mask=response_mask)
    if rollout_log_probs is not None:
        _require_shapes(log_probs, rollout_log_probs=rollout_log_probs)
    elif behav_imp_weight_cap is not None:
        warnings.warn("behav_imp_weight_cap has no effect without rollout_log_probs", stacklevel=2)
    if loss_agg_mode == "seq-mean-token-sum-norm" and loss_norm_length is None:
        warnings.warn(f"loss_agg_mode={loss_agg_mode} divides by loss_norm_length, taken as 1", stacklevel=2)
        loss_norm_length = 1.0
    settings = LossSettings(
        clip_low=clip_ratio_low,
        clip_high=clip_ratio_high,
        clip_c=clip_ratio_c,
        aggregation=loss_agg_mode,
        norm_length=loss_norm_length,
        behaviour=None if rollout_log_probs is None else Behaviour(behav_imp_weight_mode, behav_imp_weight_cap),
    )
    note = length_weighting_note(loss_mode, loss_agg_mode)
    if note is not None:
        warnings.warn(note, stacklevel=2)
    inputs = LossInputs(
        log_probs=log_probs,
        old_log_probs=old_log_probs,
        advantages=_expand_advantages(advantages, log_probs),
        mask=response_mask,
        totals=totals or count_totals(response_mask),
        rollout_log_probs=rollout_log_probs,
    )
    output = get_policy_loss(loss_mode)(inputs, settings)
    # With the totals of a larger mini-batch the metric rescales itself; a caller here expects the loss it got.
    return output.loss, _as_floats(output.metrics) | {"actor/pg_loss": float(output.loss.detach())}


def compute_advantage(
    adv_estimator: str,
    token_level_rewards: Tensor,
    response_mask: Tensor,
    group_ids: Tensor | Sequence[Any],
    *,
    values: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 1.0,
    norm_adv_by_std_in_grpo: bool = True,
    std_level: str = "group",
    **kw: Any,
) -> tuple[Tensor, Tensor]:
    """(advantages, returns), both [B,T] and 0 where the mask is 0; rows with equal `group_ids` are one group.

    `kw` holds what only some estimators read, such as `reward_baselines` [B] for `remax`; others refuse it.
    """
    _require_shapes(token_level_rewards, response_mask=response_mask)
    if values is not None:
        _require_shapes(token_level_rewards, values=values)
    rewards = token_level_rewards.detach()
    if rewards.dtype not in (torch.float32, torch.float64):
        rewards = rewards.float()
    bad_rows = (~rewards.isfinite()).any(dim=-1).nonzero().flatten().tolist()
    if bad_rows:
        raise ValueError(
            f"token_level_rewards is not finite in row {bad_rows[0]} ({len(bad_rows)} such rows): "
            "leave out answers whose reward failed before computing advantages"
        )
    inputs = AdvantageInputs(
        rewards=rewards,
        mask=response_mask.bool(),
        group_ids=_as_group_numbers(group_ids, rewards.shape[0]),
        values=values,
        gamma=gamma,
        lam=lam,
        norm_by_std=norm_adv_by_std_in_grpo,
        std_level=std_level,
        options=kw,
    )
    return ADVANTAGE_ESTIMATORS.get(adv_estimator)(inputs)


def kl_penalty(kind: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Per-token KL estimate, same shape as the inputs; kinds: k1|kl, abs, k2|mse, k3|low_var_kl."""
    _require_shapes(log_probs, ref_log_probs=ref_log_probs)
    return kl_estimate(kind, log_probs, ref_log_probs)


def _expand_advantages(advantages: Tensor, like: Tensor) -> Tensor:
    if advantages.shape == like.shape:
        return advantages
    if advantages.ndim == 1 and advantages.shape[0] == like.shape[0]:
        return advantages.unsqueeze(-1).expand(like.shape)
    raise ValueError(
        f"advantages has shape {tuple(advantages.shape)}: expected {tuple(like.shape[:1])} or {tuple(like.shape)}"
    )


def _as_group_numbers(group_ids: Tensor | Sequence[Any], num_rows: int) -> Tensor:
    """Group ids of any hashable kind as int64 [B]."""
    if len(group_ids) != num_rows:
        raise ValueError(f"group_ids has {len(group_ids)} entries: expected one for each of the {num_rows} rows")
    if isinstance(group_ids, Tensor):
        return group_ids
    numbers: dict[Any, int] = {}
    return torch.tensor([numbers.setdefault(key, len(numbers)) for key in group_ids], dtype=torch.int64)


def _as_floats(metrics: Metrics) -> dict[str, float]:
    """Results of the metrics; an extreme over no sequence at all reads 0, as an empty mean does."""

    def read(metric: Metric) -> float:
        value = metric.result()
        return 0.0 if metric.kind in ("min", "max") and math.isinf(value) else value

    return {name: read(metric) for name, metric in metrics.items()}


def _require_shapes(like: Tensor, **tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        if tensor.shape != like.shape:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {tuple(like.shape)}, as the first")
