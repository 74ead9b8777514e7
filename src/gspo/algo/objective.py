"""What is optimised: advantages from rewards, the policy loss with its clip range, and the terms beside it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo.algo.aggregation import aggregate
from gspo.algo.controllers import ClipController
from gspo.algo.functional import compute_advantage, kl_penalty
from gspo.algo.losses import get_policy_loss
from gspo.algo.settings import LossSettings
from gspo.training.policy import PolicyLoss
from gspo.types import BatchTotals, LossInputs, LossOutput, Metric, Metrics, TrainBatch


@dataclass(frozen=True, slots=True)
class AdvantageSettings:
    """How rewards become advantages: the estimator's name and its constants."""

    estimator: str = "grpo"
    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True


@dataclass(frozen=True, slots=True)
class BoundLoss:
    """A policy loss by name with its settings: what travels to other processes in place of a function."""

    name: str
    settings: LossSettings

    def __call__(self, x: LossInputs) -> LossOutput:
        return get_policy_loss(self.name)(x, self.settings)


@dataclass
class Objective:
    """One step's objective. `settings` has every default filled in; ε moves only under `clip_control`."""

    loss_mode: str
    settings: LossSettings
    advantage: AdvantageSettings
    clip_control: ClipController
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0
    kl_kind: str = "low_var_kl"

    def with_advantages(
        self, batch: TrainBatch, weights: Tensor | None = None, baselines: Tensor | None = None
    ) -> TrainBatch:
        """The batch with advantages and returns; `weights` [B] scale a sequence's advantage, `baselines` [B] are remax's."""
        rewards = torch.zeros_like(batch.mask, dtype=torch.float64)
        last = torch.tensor([len(r) - 1 for r in batch.response_ids])
        rewards[torch.arange(batch.num_sequences), last] = batch.scores
        advantages, returns = compute_advantage(
            self.advantage.estimator,
            rewards,
            batch.mask,
            batch.group_ids,
            values=batch.values,
            gamma=self.advantage.gamma,
            lam=self.advantage.lam,
            norm_adv_by_std_in_grpo=self.advantage.norm_by_std,
            **({} if baselines is None else {"reward_baselines": baselines}),
        )
        if weights is not None:
            advantages = advantages * weights[:, None]
        return dataclasses.replace(batch, advantages=advantages, returns=returns)

    def clip_range(self) -> tuple[float, float]:
        """ε below and above 1 for this step."""
        assert self.settings.clip_low is not None and self.settings.clip_high is not None
        factor = self.clip_control.factor
        return self.settings.clip_low * factor, self.settings.clip_high * factor

    def loss(self) -> PolicyLoss:
        """The policy loss with this step's clip range."""
        low, high = self.clip_range()
        return BoundLoss(self.loss_mode, dataclasses.replace(self.settings, clip_low=low, clip_high=high))

    def regulariser(
        self, log_probs: Tensor, ref: Tensor | None, entropy: Tensor | None, mask: Tensor, counts: BatchTotals
    ) -> LossOutput | None:
        """KL against the reference and the entropy bonus, aggregated as the policy loss is."""
        terms: list[Tensor] = []
        metrics: Metrics = {}
        if self.kl_coef and ref is not None:
            kl = self._aggregate(kl_penalty(self.kl_kind, log_probs, ref) * mask, mask, counts)
            terms.append(self.kl_coef * kl)
            share = mask.sum() / max(counts.num_tokens, 1.0)
            metrics["actor/kl_loss"] = Metric.mean(kl.detach(), share)
            metrics["actor/kl_coef"] = Metric("last", self.kl_coef)
        if self.entropy_coeff and entropy is not None:
            terms.append(-self.entropy_coeff * self._aggregate(entropy * mask, mask, counts))
        if not terms:
            return None
        return LossOutput(torch.stack(terms).sum(), metrics)

    def _aggregate(self, values: Tensor, mask: Tensor, counts: BatchTotals) -> Tensor:
        assert self.settings.aggregation is not None
        return aggregate(values, mask, counts, self.settings.aggregation, self.settings.norm_length)

    def observe(self, metrics: Metrics) -> Metrics:
        """Take note of a step: moves the clip range for the next one, returns what was in force."""
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

    def state_dict(self) -> dict[str, Any]:
        return {"clip": self.clip_control.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clip_control.load_state_dict(state["clip"])
