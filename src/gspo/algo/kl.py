"""KL between the policy and the frozen reference: estimators, loss term, reward term and the controllers of β."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from gspo.algo.aggregation import aggregate
from gspo.algo.settings import KL_KINDS
from gspo.metrics import Metric
from gspo.types import BatchTotals, LossOutput


def kl_estimate(kind: str, log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    """Per-token estimate of KL(π_θ ‖ π_ref) from tokens sampled under π_θ.

    With d = logp - ref: k1 = d, abs = |d|, k2 = d²/2, k3 = exp(-d) + d - 1 (-d clamped to ±20, the value to ±10). k1+
    and k3+ have the value of k1 and k3 and the gradient of k2, which is that of the KL.
    """
    if kind.endswith("+"):
        value, half_square = (kl_estimate(k, log_probs, ref_log_probs) for k in (kind[:-1], "k2"))
        return half_square - half_square.detach() + value.detach()
    difference = log_probs - ref_log_probs
    if kind in ("k1", "kl"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("k2", "mse"):
        return 0.5 * difference.square()
    if kind in ("k3", "low_var_kl"):
        negated = (-difference).clamp(-20.0, 20.0)
        # expm1 keeps the digits that exp(x) - 1 loses near the optimum, where d is tiny.
        return (torch.expm1(negated) - negated).clamp(-10.0, 10.0)
    raise ValueError(f"kl kind {kind!r} is unknown: expected one of {', '.join(KL_KINDS)}")


def kl_loss(
    kind: str,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    mask: Tensor,
    totals: BatchTotals,
    aggregation: str,
    norm_length: float | None = None,
) -> LossOutput:
    """The KL term of one micro-batch, aggregated as the policy loss is, not yet multiplied by its coefficient."""
    mask = mask.bool()
    kl_BT = _masked_kl(kind, log_probs, ref_log_probs, mask)
    loss = aggregate(kl_BT, mask, totals, aggregation, norm_length)
    share = mask.sum() / max(totals.num_tokens, 1.0)
    return LossOutput(loss, {"actor/kl_loss": Metric.mean(loss.detach(), share)})


@torch.no_grad()
def token_kl(kind: str, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """KL_t [B,T] of every token in double precision, 0 where the mask is 0; its β-fold is subtracted from the reward."""
    return _masked_kl(kind, log_probs, ref_log_probs, mask.bool()).double()


class KLController(Protocol):
    """Holds β. `update` is called once per step with the measured KL and its number of sequences."""

    value: float

    def update(self, current_kl: float, num: int) -> None: ...

    def state_dict(self) -> dict[str, float]: ...

    def load_state_dict(self, state: dict[str, float]) -> None: ...


@dataclass(slots=True)
class FixedController:
    """A constant β."""

    value: float

    def update(self, current_kl: float, num: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])


@dataclass(slots=True)
class AdaptiveController:
    """β ← β·(1 + clip(kl/target - 1, ±0.2)·n/horizon) (arXiv 1909.08593, section 2.2)."""

    value: float
    target: float
    horizon: float

    def __post_init__(self) -> None:
        for key, number in (("target_kl", self.target), ("horizon", self.horizon)):
            if not number > 0:
                raise ValueError(f"kl_ctrl.{key}={number}: expected a number above 0 for an adaptive controller")

    def update(self, current_kl: float, num: int) -> None:
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * num / self.horizon

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = float(state["value"])


def make_controller(kind: str, coefficient: float, target: float = 0.1, horizon: float = 10_000) -> KLController:
    """A controller by its config name, `fixed` or `adaptive`."""
    if kind == "fixed":
        return FixedController(coefficient)
    if kind == "adaptive":
        return AdaptiveController(coefficient, target, horizon)
    raise ValueError(f"kl_ctrl.type={kind!r}: expected fixed or adaptive")


def _masked_kl(kind: str, log_probs: Tensor, ref_log_probs: Tensor, mask: Tensor) -> Tensor:
    """The estimate on trained tokens, 0 elsewhere; cleaned before the formula so that padding has no gradient."""
    return kl_estimate(kind, torch.where(mask, log_probs, 0.0), torch.where(mask, ref_log_probs.detach(), 0.0))
