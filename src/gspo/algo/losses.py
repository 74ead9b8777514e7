"""The policy losses, each written as its formula, and the registry through which a user adds one.

A formula sees `LossInputs` that are already clean (bool mask; 0 wherever the mask is 0; at least float32) and
`LossSettings` in which no default is left open. It returns a loss divided by the mini-batch's totals, so that
micro-batch losses add up, and mergeable metrics.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.algo.aggregation import aggregate
from gspo.algo.decoupled import behaviour_weight
from gspo.algo.diagnostics import ClipBand, policy_metrics
from gspo.algo.ratios import (
    SEQUENCE_LOG_RATIO_LIMIT,
    TOKEN_LOG_RATIO_LIMIT,
    importance_ratio,
    masked_log_ratio,
    mean_log_ratio,
)
from gspo.algo.settings import LOSSES, RATIO_LEVELS, SEQUENCE_LEVELS, LossDefaults, LossSettings
from gspo.registry import Registry
from gspo.types import LossInputs, LossOutput

Formula = Callable[[LossInputs, LossSettings], LossOutput]


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """A registered loss: its formula and its defaults."""

    name: str
    formula: Formula
    defaults: LossDefaults

    def resolve(self, settings: LossSettings) -> LossSettings:
        """`settings` with this loss's defaults in place of None; refuses a ratio level the loss cannot use."""
        defaults = self.defaults
        level = defaults.levels[0] if settings.level is None else settings.level
        if level not in defaults.levels:
            raise ValueError(
                f"importance_sampling_level={level} cannot be used with loss_mode={self.name}, which supports "
                f"{' or '.join(defaults.levels)}; leave it unset or choose another loss_mode"
            )
        return dataclasses.replace(
            settings,
            level=level,
            clip_low=defaults.clip_low if settings.clip_low is None else settings.clip_low,
            clip_high=defaults.clip_high if settings.clip_high is None else settings.clip_high,
            aggregation=settings.aggregation or defaults.aggregation,
        )

    def __call__(self, x: LossInputs, settings: LossSettings | None = None) -> LossOutput:
        """Loss and metrics of one micro-batch; settings that are None have this loss's defaults."""
        return self.compute(x, self.resolve(settings or LossSettings()))

    def compute(self, x: LossInputs, resolved: LossSettings) -> LossOutput:
        """Loss and metrics of one micro-batch under settings that `resolve` returned."""
        return self.formula(clean_inputs(x), resolved)


POLICY_LOSSES: Registry[PolicyLoss] = Registry("loss_mode")


def policy_loss(
    name: str,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    aggregation: str = "token-mean",
    levels: tuple[str, ...] = RATIO_LEVELS,
) -> Callable[[Formula], Formula]:
    """Register a formula `(LossInputs, LossSettings) -> LossOutput` under `name`, with its defaults.

    The defaults of the built-in losses are in the table `LOSSES`, which the config reads too.
    """
    defaults = LOSSES.get(name) or LossDefaults(clip_low, clip_high, aggregation, levels)

    def register(formula: Formula) -> Formula:
        POLICY_LOSSES.add(name, PolicyLoss(name, formula, defaults), source=formula)
        return formula

    return register


def get_policy_loss(name: str) -> PolicyLoss:
    """The loss registered under `name`; an unknown name is a ValueError that suggests the nearest."""
    return POLICY_LOSSES.get(name)


@policy_loss("gspo")
def gspo(x: LossInputs, s: LossSettings) -> LossOutput:
    """Sequence ratio s_i = exp(mean_t log-ratio), clipped per sequence (arXiv 2507.18071, eq. 5-7)."""
    ratio_B1 = importance_ratio(s.level, x)
    return reduce_loss(clipped_surrogate(ratio_B1, x.advantages, s), x, s, ratio_band(ratio_B1, s))


@policy_loss("gspo_token")
def gspo_token(x: LossInputs, s: LossSettings) -> LossOutput:
    """Value s_i, gradient token by token, for per-token advantages (arXiv 2507.18071, eq. 13-14)."""
    ratio_BT = importance_ratio(s.level, x)
    return reduce_loss(clipped_surrogate(ratio_BT, x.advantages, s), x, s, ratio_band(ratio_BT, s))


@policy_loss("vanilla")
def vanilla(x: LossInputs, s: LossSettings) -> LossOutput:
    """PPO's clipped surrogate (arXiv 1707.06347, eq. 7) with the dual clip for A < 0 (arXiv 1912.09729)."""
    ratio = importance_ratio(s.level, x)
    loss_BT = dual_clip(clipped_surrogate(ratio, x.advantages, s), x.advantages, s.clip_c)
    return reduce_loss(loss_BT, x, s, ratio_band(ratio, s, dual=s.clip_c))


@policy_loss("dapo")
def dapo(x: LossInputs, s: LossSettings) -> LossOutput:
    """`vanilla` with a higher upper bound and token-mean (arXiv 2503.14476)."""
    return vanilla(x, s)


@policy_loss("cispo")
def cispo(x: LossInputs, s: LossSettings) -> LossOutput:
    """-sg(clip(r))·A·logp: the weight is clipped and every token keeps its gradient (arXiv 2506.13585)."""
    ratio = importance_ratio(s.level, x).detach()
    loss_BT = -clip_ratio(ratio, s) * x.advantages * x.log_probs
    return reduce_loss(loss_BT, x, s, ratio_band(ratio, s))


@policy_loss("geo_mean")
def geo_mean(x: LossInputs, s: LossSettings) -> LossOutput:
    """Tokens clipped in log space, then their geometric mean per sequence (GMPO, arXiv 2507.20673)."""
    assert s.clip_low is not None and s.clip_high is not None
    limit = TOKEN_LOG_RATIO_LIMIT
    log_ratio_BT = masked_log_ratio(x.log_probs, x.old_log_probs, x.mask).clamp(-limit, limit)
    rising_BT, falling_BT = log_ratio_BT.clamp(max=s.clip_high), log_ratio_BT.clamp(min=-s.clip_low)
    clipped_BT = torch.where(x.advantages < 0, falling_BT, torch.where(x.advantages > 0, rising_BT, log_ratio_BT))
    ratio_B1 = mean_log_ratio(clipped_BT, x.mask).clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()
    band = ClipBand(log_ratio_BT, floor=-s.clip_low, ceiling=s.clip_high, count_sequences=False)
    return reduce_loss(-x.advantages * ratio_B1, x, s, band)


@policy_loss("sapo")
def sapo(x: LossInputs, s: LossSettings) -> LossOutput:
    """-A·σ(τ(r-1))·4/τ: a soft gate of slope 1 at r = 1, τ by the sign of A (arXiv 2511.20347).

    There is no clip: the clip range only says which band the clip fractions count against.
    """
    ratio = importance_ratio(s.level, x)
    tau_BT = torch.full_like(x.advantages, s.tau_neg).masked_fill(x.advantages > 0, s.tau_pos)
    gate_BT = torch.sigmoid(tau_BT * (ratio - 1.0)) * (4.0 / tau_BT)
    return reduce_loss(-x.advantages * gate_BT, x, s, ratio_band(ratio, s))


@policy_loss("clip_cov")
def clip_cov(x: LossInputs, s: LossSettings) -> LossOutput:
    """PPO's clip, and no gradient for a few tokens whose covariance collapses the entropy (arXiv 2505.22617, eq. 11).

    The tokens are drawn from those between the bounds; a fixed seed makes the draw a function of the micro-batch.
    """
    ratio_BT = importance_ratio(s.level, x)
    loss_BT = clipped_surrogate(ratio_BT, x.advantages, s)
    covariance_BT = token_covariance(x)
    unclipped_BT = x.mask & (loss_BT == -x.advantages * ratio_BT)
    low, high = s.clip_cov_bounds
    candidates = (unclipped_BT & (covariance_BT > low) & (covariance_BT < high)).flatten().nonzero().flatten()
    num_chosen = max(1, int(s.clip_cov_ratio * int(x.mask.sum())))
    order = torch.randperm(len(candidates), generator=torch.Generator().manual_seed(len(candidates)))
    chosen = candidates[order.to(candidates.device)][:num_chosen]
    kept_BT = torch.ones_like(loss_BT).flatten().index_fill(0, chosen, 0.0).view_as(loss_BT)
    return reduce_loss(loss_BT * kept_BT, x, s, ratio_band(ratio_BT, s))


@policy_loss("kl_cov")
def kl_cov(x: LossInputs, s: LossSettings) -> LossOutput:
    """-A·r, and a penalty |log r| on the tokens of the greatest covariance (arXiv 2505.22617, eq. 13). No clip."""
    ratio_BT = importance_ratio(s.level, x)
    log_ratio_BT = masked_log_ratio(x.log_probs, x.old_log_probs, x.mask)
    num_tokens = int(x.mask.sum())
    num_chosen = min(num_tokens, max(1, int(s.kl_cov_ratio * num_tokens)))
    ranked = token_covariance(x).masked_fill(~x.mask, float("-inf")).flatten().topk(num_chosen).indices
    chosen_BT = torch.zeros_like(ratio_BT).flatten().index_fill(0, ranked, 1.0).view_as(ratio_BT)
    loss_BT = -x.advantages * ratio_BT + s.kl_cov_coef * chosen_BT * log_ratio_BT.abs()
    return reduce_loss(loss_BT, x, s, ratio_band(ratio_BT, s))


@policy_loss("gpg")
def gpg(x: LossInputs, s: LossSettings) -> LossOutput:
    """-A·logp: the policy gradient itself, without a ratio or a clip (arXiv 2504.02546)."""
    ratio_BT = importance_ratio(s.level, x).detach()
    return reduce_loss(-x.advantages * x.log_probs, x, s, ratio_band(ratio_BT, s))


@torch.no_grad()
def token_covariance(x: LossInputs) -> Tensor:
    """(A - mean A)·(logp - mean logp) of each token over those of the micro-batch: what drives the entropy down."""
    count = x.mask.sum().clamp(min=1)
    advantage_BT = x.advantages - x.advantages.sum() / count
    log_prob_BT = x.log_probs - x.log_probs.sum() / count
    return torch.where(x.mask, advantage_BT * log_prob_BT, 0.0)


def clip_ratio(ratio: Tensor, s: LossSettings) -> Tensor:
    """clip(r, 1 - ε_low, 1 + ε_high)."""
    assert s.clip_low is not None and s.clip_high is not None
    return ratio.clamp(1.0 - s.clip_low, 1.0 + s.clip_high)


def clipped_surrogate(ratio: Tensor, advantages_BT: Tensor, s: LossSettings) -> Tensor:
    """max(-A·r, -A·clip(r)): gradient exactly 0 where the clip acts."""
    return torch.maximum(-advantages_BT * ratio, -advantages_BT * clip_ratio(ratio, s))


def dual_clip(loss_BT: Tensor, advantages_BT: Tensor, c: float | None) -> Tensor:
    """min(loss, -A·c) where A < 0, which bounds the loss of a token whose ratio exploded."""
    if c is None:
        return loss_BT
    return torch.where(advantages_BT < 0, torch.minimum(loss_BT, -advantages_BT * c), loss_BT)


def ratio_band(ratio: Tensor, s: LossSettings, dual: float | None = None) -> ClipBand:
    """The band in which `clip_ratio` leaves a ratio alone; sequence levels count sequences."""
    assert s.clip_low is not None and s.clip_high is not None
    per_sequence = s.level in SEQUENCE_LEVELS
    return ClipBand(ratio.detach(), 1.0 - s.clip_low, 1.0 + s.clip_high, per_sequence, dual)


def reduce_loss(loss_BT: Tensor, x: LossInputs, s: LossSettings, band: ClipBand) -> LossOutput:
    """Apply the behaviour weight when decoupled, aggregate over the totals, and compute the metrics."""
    weight = behaviour_weight(x, s.behaviour) if s.behaviour is not None else None
    if weight is not None:
        loss_BT = loss_BT * weight.applied
    loss = aggregate(loss_BT, x.mask, x.totals, s.aggregation, s.norm_length)
    return LossOutput(loss, policy_metrics(x, loss, band, weight))


def clean_inputs(x: LossInputs) -> LossInputs:
    """The same inputs with a bool mask, zeros (and zero gradient) where it is 0, and at least float32."""
    mask = x.mask.bool()

    def clean(tensor: Tensor) -> Tensor:
        wide = tensor if tensor.dtype == torch.float64 else tensor.float()
        return torch.where(mask, wide, 0.0)

    return LossInputs(
        log_probs=clean(x.log_probs),
        old_log_probs=clean(x.old_log_probs.detach()),
        advantages=clean(x.advantages.detach()),
        mask=mask,
        totals=x.totals,
        rollout_log_probs=None if x.rollout_log_probs is None else clean(x.rollout_log_probs.detach()),
        turn_ids=x.turn_ids,
    )
