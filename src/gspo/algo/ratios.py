"""Importance ratios between the policy being trained (π_θ) and π_old, at four levels.

All functions take the masked log-ratio `log_probs - old_log_probs` (0 on untrained tokens), so that nothing outside
the mask can reach a value or a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.types import LossInputs

TOKEN_LOG_RATIO_LIMIT = 20.0
SEQUENCE_LOG_RATIO_LIMIT = 10.0


def masked_log_ratio(numerator: Tensor, denominator: Tensor, mask: Tensor) -> Tensor:
    """`numerator - denominator` on trained tokens and exactly 0 elsewhere, whatever the inputs are there."""
    return torch.where(mask, numerator - denominator, 0.0)


def sequence_lengths(mask: Tensor) -> Tensor:
    """[B,1] trained tokens of each sequence, at least 1 so that it can be divided by."""
    return mask.sum(dim=-1, keepdim=True).clamp(min=1)


def mean_log_ratio(log_ratio_BT: Tensor, mask: Tensor) -> Tensor:
    """[B,1] log of the geometric-mean ratio, not clamped; 0 for a sequence without trained tokens."""
    return log_ratio_BT.sum(dim=-1, keepdim=True) / sequence_lengths(mask)


def token_ratio(log_ratio_BT: Tensor) -> Tensor:
    """[B,T] r_it = exp(log-ratio), the log-ratio clamped to ±20."""
    return log_ratio_BT.clamp(-TOKEN_LOG_RATIO_LIMIT, TOKEN_LOG_RATIO_LIMIT).exp()


def sequence_ratio(log_ratio_BT: Tensor, mask: Tensor) -> Tensor:
    """[B,1] s_i = exp(mean_t log-ratio) (arXiv 2507.18071, eq. 7), its log clamped above at 10."""
    return mean_log_ratio(log_ratio_BT, mask).clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()


def sequence_token_ratio(log_ratio_BT: Tensor, mask: Tensor) -> Tensor:
    """[B,T] value s_i, gradient through the token's own log-prob (GSPO-token, arXiv 2507.18071, eq. 14)."""
    log_sequence_B1 = mean_log_ratio(log_ratio_BT.detach(), mask)
    through_token_BT = log_ratio_BT - log_ratio_BT.detach()
    return (through_token_BT + log_sequence_B1).clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()


def turn_ratio(log_ratio_BT: Tensor, mask: Tensor, turn_ids: Tensor | None) -> Tensor:
    """[B,T] s_ik = exp(mean log-ratio over turn k), the same on all tokens of a turn, its log clamped above at 10.

    Without turns the response is one turn.
    """
    if turn_ids is None:
        return sequence_ratio(log_ratio_BT, mask).expand(log_ratio_BT.shape)
    log_turn_BT = torch.zeros_like(log_ratio_BT)
    for turn in range(int(turn_ids.max()) + 1):  # one sum after another: a scatter on a GPU adds in no fixed order
        own_BT = mask & (turn_ids == turn)
        mean_B1 = mean_log_ratio(torch.where(own_BT, log_ratio_BT, 0.0), own_BT)
        log_turn_BT = torch.where(own_BT, mean_B1, log_turn_BT)
    return log_turn_BT.clamp(max=SEQUENCE_LOG_RATIO_LIMIT).exp()


def importance_ratio(level: str | None, x: LossInputs) -> Tensor:
    """The ratio at `level`: [B,T], or [B,1] for `sequence`, which broadcasts over the tokens."""
    log_ratio_BT = masked_log_ratio(x.log_probs, x.old_log_probs, x.mask)
    if level == "token":
        return token_ratio(log_ratio_BT)
    if level == "sequence":
        return sequence_ratio(log_ratio_BT, x.mask)
    if level == "sequence_token":
        return sequence_token_ratio(log_ratio_BT, x.mask)
    if level == "turn":
        return turn_ratio(log_ratio_BT, x.mask, x.turn_ids)
    raise ValueError(f"importance_sampling_level={level!r}: expected token, sequence, sequence_token or turn")
