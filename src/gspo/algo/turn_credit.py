"""Credit by turn: each turn is judged by the rewards that follow it, against the siblings at the same turn.

G_ik = Σ_{j≥k} γ^(j-k) r_ij is the return of rollout i from its turn k on, and A_ik = G_ik - mean over the siblings m ≠
i of G_mk. A sibling that ended before turn k has the return 0 there. The baseline of a turn uses other rollouts alone
and does not depend on what rollout i did, so the policy gradient stays unbiased. (A baseline over those siblings that
reached turn k would not be: which of them do depends on what they did before. Dividing by a deviation per turn is not
either.)
"""

from __future__ import annotations

import torch
from torch import Tensor


def returns_to_go(rewards_BK: Tensor, discount: float = 1.0) -> Tensor:
    """[B,K] G_k = r_k + γ·G_{k+1}."""
    returns_BK = torch.zeros_like(rewards_BK)
    running = rewards_BK.new_zeros(len(rewards_BK))
    for k in reversed(range(rewards_BK.shape[1])):
        running = rewards_BK[:, k] + discount * running
        returns_BK[:, k] = running
    return returns_BK


def turn_advantages(rewards_BK: Tensor, group_ids_B: Tensor, discount: float = 1.0) -> tuple[Tensor, Tensor]:
    """(advantages, returns) [B,K] in float64. `rewards_BK` is 0 after a rollout's last turn. A group of one: no baseline."""
    returns_BK = returns_to_go(rewards_BK.detach().to("cpu", torch.float64), discount)
    unique, index = torch.unique(group_ids_B.to("cpu"), return_inverse=True)

    def total(values_BK: Tensor) -> Tensor:
        sums = torch.zeros(unique.numel(), values_BK.shape[1], dtype=torch.float64)
        return sums.index_add_(0, index, values_BK)[index]

    others_B1 = total(torch.ones_like(returns_BK))[:, :1] - 1
    baseline_BK = (total(returns_BK) - returns_BK) / others_B1.clamp(min=1)
    return returns_BK - baseline_BK, returns_BK


def spread_over_tokens(values_BK: Tensor, turn_ids_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B,T] the value of each trained token's turn, 0 elsewhere."""
    picked = values_BK.gather(1, turn_ids_BT.clamp(min=0))
    return torch.where(mask_BT.bool() & (turn_ids_BT >= 0), picked, 0.0)
