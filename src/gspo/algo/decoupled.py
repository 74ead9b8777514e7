"""The behaviour weight w = π_old/μ of the decoupled loss (decoupled PPO, arXiv 2110.00641; used by AReaL)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.algo.ratios import masked_log_ratio, sequence_ratio, token_ratio
from gspo.algo.settings import Behaviour
from gspo.types import LossInputs


@dataclass(frozen=True, slots=True)
class BehaviourWeight:
    """The detached weight of each token ([B,T], or [B,1] for sequence modes) before and after the cap."""

    raw: Tensor
    applied: Tensor
    capped: Tensor  # bool, where the cap acted


def behaviour_weight(x: LossInputs, behaviour: Behaviour) -> BehaviourWeight:
    """w = exp(old - μ), per token, or as the geometric mean or the product of a sequence; above the cap 0 (mask) or the cap (truncate).

    The cap changes weights only: the denominators of the loss stay those of all trained tokens.
    """
    if x.rollout_log_probs is None:
        raise ValueError("the decoupled loss needs rollout_log_probs, the behaviour policy's log-probs; they are None")
    log_weight_BT = masked_log_ratio(x.old_log_probs, x.rollout_log_probs, x.mask).detach()
    level, action = behaviour.mode.rsplit("_", 1)
    if level == "sequence_product":  # the whole response's likelihood ratio, not its mean per token
        raw = token_ratio(log_weight_BT.sum(dim=-1, keepdim=True))
    else:
        raw = sequence_ratio(log_weight_BT, x.mask) if level == "sequence" else token_ratio(log_weight_BT)
    if behaviour.cap is None:
        return BehaviourWeight(raw, raw, torch.zeros_like(raw, dtype=torch.bool))
    above_cap = raw > behaviour.cap
    replacement = 0.0 if action == "mask" else behaviour.cap
    return BehaviourWeight(raw, torch.where(above_cap, replacement, raw), above_cap)
