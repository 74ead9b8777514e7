"""The objective: advantages from rewards, the policy loss with its clip range, and the KL and entropy terms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo.algo.advantages import distillation, whiten
from gspo.algo.aggregation import aggregate
from gspo.algo.branches import rollout_of_rows, rollouts_alone, weight_of_rows, with_branches
from gspo.algo.controllers import ClipController
from gspo.algo.kl import kl_loss
from gspo.algo.losses import get_policy_loss
from gspo.algo.settings import LossSettings
from gspo.algo.turn_credit import spread_over_tokens, turn_advantages
from gspo.metrics import Metric, Metrics
from gspo.types import AdvantageBatch, BatchTotals, LossInputs, LossOutput, ScoredBatch

# (rewards [B,T], mask, group_ids, values=…, **options) → (advantages, returns): `compute_advantage` with its constants
ComputeAdvantage = Callable[..., tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class BoundLoss:
    """A policy loss by name with its settings: sent to other processes in place of a function.

    The loss's defaults are filled into the settings once, here.
    """

    name: str
    settings: LossSettings

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", get_policy_loss(self.name).resolve(self.settings))

    def __call__(self, x: LossInputs) -> LossOutput:
        return get_policy_loss(self.name).compute(x, self.settings)


@dataclass(frozen=True, slots=True)
class BoundRegulariser:
    """The KL and entropy terms with their weights; it is sent to other processes like BoundLoss.

    A weight of 0 switches its term off. `aggregation` and `norm_length` are those of the policy loss.
    """

    aggregation: str
    norm_length: float | None = None
    kl_coef: float = 0.0
    kl_kind: str = "low_var_kl"
    entropy_coeff: float = 0.0

    def __call__(
        self, log_probs: Tensor, ref: Tensor | None, entropy: Tensor | None, mask: Tensor, totals: BatchTotals
    ) -> LossOutput | None:
        """kl_coef·KL(π_θ ‖ π_ref) - entropy_coeff·H, and the metrics of the KL term; None when both are off."""
        how = (self.aggregation, self.norm_length)
        terms: list[Tensor] = []
        metrics: Metrics = {}
        if self.kl_coef and ref is not None:
            kl = kl_loss(self.kl_kind, log_probs, ref, mask, totals, *how)
            terms.append(self.kl_coef * kl.loss)
            metrics = {**kl.metrics, "actor/kl_coef": Metric("last", self.kl_coef)}
        if self.entropy_coeff and entropy is not None:
            terms.append(-self.entropy_coeff * aggregate(entropy, mask, totals, *how))
        return LossOutput(torch.stack(terms).sum(), metrics) if terms else None


@dataclass
class Objective:
    """One step's objective. `settings` has every default filled in; ε moves only under `clip_control`."""

    loss_mode: str
    settings: LossSettings
    advantage: ComputeAdvantage
    clip_control: ClipController
    regulariser: BoundRegulariser | None = None
    normalize: bool = False  # whiten the advantages of a step
    turn_discount: float | None = None  # of returns to go, which replace `advantage` where there are turns
    reads_teacher: bool = False  # `advantage` is made of π_old and the reference's log-probs
    distill_weight: float = 0.0  # of log π_teacher - log π_old, which is added to the advantages

    def with_advantages(
        self, batch: ScoredBatch, weights: Tensor | None = None, baselines: Tensor | None = None
    ) -> AdvantageBatch:
        """The batch with advantages and returns; `weights` [B] scale a sequence's advantage, `baselines` [B] are remax's."""
        by_token = self.distill_weight * distillation(*_teacher(batch), batch.mask) if self.distill_weight else None
        if batch.branch_of and not self.reads_teacher:
            rewarded = dataclasses.replace(self, distill_weight=0.0)
            alone = rewarded.with_advantages(rollouts_alone(batch), weights, baselines)
            return with_branches(batch, alone, self.settings.aggregation, by_token)
        advantages, returns = self._estimate(batch, baselines)
        if self.normalize:
            advantages = whiten(advantages, batch.mask.bool())
        if weights is not None:
            advantages = advantages * weights[rollout_of_rows(batch)][:, None]
        if by_token is not None:
            advantages = advantages + by_token
        if batch.branch_of:  # each token has an advantage of its own
            advantages = advantages * weight_of_rows(batch, self.settings.aggregation)
        return batch.with_advantages(advantages, returns)

    def _estimate(self, batch: ScoredBatch, baselines: Tensor | None) -> tuple[Tensor, Tensor]:
        """Advantages and returns, by turn where `turn_discount` is set.

        The score is the reward of a response's last token; a KL penalty is charged to the token that causes it.
        """
        if self.turn_discount is not None and batch.turn_ids is not None and batch.turn_rewards is not None:
            by_turn = turn_advantages(batch.turn_rewards, batch.group_ids, self.turn_discount)
            advantages, returns = (spread_over_tokens(values, batch.turn_ids, batch.mask) for values in by_turn)
            return advantages, returns
        rewards = torch.zeros_like(batch.mask, dtype=torch.float64)
        last = torch.tensor([len(r) - 1 for r in batch.response_ids])
        rewards[torch.arange(batch.num_sequences), last] = batch.scores
        if batch.kl_penalties is not None:
            rewards[torch.arange(batch.num_sequences), last] += batch.kl_penalties.sum(dim=-1)
            rewards -= batch.kl_penalties
        options = {} if baselines is None else {"reward_baselines": baselines}
        if self.reads_teacher:
            options |= dict(zip(("old_log_probs", "ref_log_probs"), _teacher(batch)))
        return self.advantage(rewards, batch.mask, batch.group_ids, values=batch.values, **options)

    def clip_range(self) -> tuple[float, float]:
        """ε below and above 1 for this step."""
        assert self.settings.clip_low is not None and self.settings.clip_high is not None
        factor = self.clip_control.factor
        return self.settings.clip_low * factor, self.settings.clip_high * factor

    def loss(self) -> BoundLoss:
        """The policy loss with this step's clip range."""
        low, high = self.clip_range()
        return BoundLoss(self.loss_mode, dataclasses.replace(self.settings, clip_low=low, clip_high=high))

    def observe(self, metrics: Metrics) -> Metrics:
        """Adapt the clip range to a step's metrics; returns the metrics of the range that was used."""
        low, high = self.clip_range()
        later = [
            metric.result()
            for name, metric in metrics.items()
            if name.startswith("actor/pg_clipfrac/mb") and not name.endswith("/mb0")
        ]
        fraction = sum(later) / len(later) if later else None
        self.clip_control.observe(fraction)
        out = {"actor/clip_ratio_low": Metric("last", low), "actor/clip_ratio_high": Metric("last", high)}
        if fraction is not None:
            out["actor/pg_clipfrac_later"] = Metric("last", fraction)
        return out

    def teacher_metrics(self, batch: ScoredBatch) -> Metrics:
        """`actor/teacher_kl`: the token mean of log π_old - log π_teacher, an estimate of KL(π ‖ π_teacher)."""
        if not self.distills:
            return {}
        gap = distillation(*_teacher(batch), batch.mask)
        return {"actor/teacher_kl": Metric.mean(-float(gap.sum()), float(batch.mask.sum()))}

    @property
    def distills(self) -> bool:
        """Whether a teacher has a part in the advantages."""
        return self.reads_teacher or self.distill_weight > 0

    def state_dict(self) -> dict[str, Any]:
        return {"clip": self.clip_control.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clip_control.load_state_dict(state["clip"])


def _teacher(batch: ScoredBatch) -> tuple[Tensor, Tensor]:
    """π_old and the teacher's log-probs of every row."""
    assert batch.ref_log_probs is not None and not batch.unscored_rows, "both are scored before the advantages"
    return batch.old_log_probs, batch.ref_log_probs
