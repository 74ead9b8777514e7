"""How a token is chosen from logits: temperature, top-k, top-p, inverse-CDF draw, and its training log-prob."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.rollout.engine import SamplingParams

_BLOCK = 512  # vocabularies above two blocks are searched block first, then inside the block


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of a batch of rows as [B,1] tensors, [1,1] when all rows agree; None when switched off."""

    temperature: Tensor | None
    greedy: Tensor | None
    top_k: Tensor | None
    top_p: Tensor | None
    max_top_k: int = 0  # 0 when some row has no top-k: a full sort is then needed
    all_greedy: bool = False
    any_top: bool = False  # whether some row wants the best tokens of every position

    @staticmethod
    def of(params: Sequence[SamplingParams], device: torch.device | str = "cpu") -> RowSampling:
        """The parameters of these rows; cheap when all rows share one object."""
        if len({id(p) for p in params}) == 1 or len(set(params)) == 1:
            params = params[:1]
        greedy = [p.temperature == 0.0 for p in params]
        # Greedy rows report log-probs at temperature 1 and ignore top-k and top-p: the best token is always kept.
        temperature = [1.0 if g else p.temperature for p, g in zip(params, greedy)]
        top_k = [0 if g else max(p.top_k, 0) for p, g in zip(params, greedy)]
        top_p = [1.0 if g else p.top_p for p, g in zip(params, greedy)]

        def column(values: Sequence[float], needed: bool, dtype: torch.dtype) -> Tensor | None:
            return torch.tensor(values, dtype=dtype, device=device).unsqueeze(1) if needed else None

        return RowSampling(
            temperature=column(temperature, any(t != 1.0 for t in temperature), torch.float32),
            greedy=column(greedy, any(greedy), torch.bool),
            top_k=column(top_k, any(top_k), torch.int64),
            top_p=column(top_p, any(p < 1.0 for p in top_p), torch.float64),
            max_top_k=max(top_k) if all(top_k) else 0,
            all_greedy=all(greedy),
            any_top=any(p.num_top for p in params),
        )


def choose(logits: Tensor, rows: RowSampling, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """The chosen token [B] of each row and its log-prob [B], float32.

    The log-prob is under the training distribution log_softmax(logits / temperature): top-k and top-p shape the
    draw but not the log-prob. `uniforms` [B] (float64, in [0,1)) may be None when every row is greedy.
    """
    scores = logits.float()
    if rows.temperature is not None:
        scores = scores / rows.temperature
    peak = scores.amax(-1, keepdim=True)
    weights = (scores - peak).exp_()
    log_total = weights.sum(-1, dtype=torch.float64).log().float()
    if rows.all_greedy:
        token = scores.argmax(-1)
    else:
        assert uniforms is not None
        if rows.top_k is not None or rows.top_p is not None:
            token = draw(weights.masked_fill(scores < cutoff(scores, rows), 0.0), uniforms)
        else:
            token = draw(weights, uniforms)
        if rows.greedy is not None:
            token = torch.where(rows.greedy[:, 0], scores.argmax(-1), token)
    log_prob = (scores.gather(1, token[:, None]) - peak)[:, 0] - log_total
    return token, log_prob


def cutoff(scores: Tensor, rows: RowSampling) -> Tensor:
    """The lowest score [B,1] that top-k then top-p keep; tokens with equal scores are kept or dropped together.

    Top-p keeps the smallest set of best tokens whose mass reaches p, after renormalising over what top-k kept.
    """
    width = rows.max_top_k or scores.shape[-1]
    best = scores.topk(min(width, scores.shape[-1]), dim=-1).values
    num_kept = torch.full_like(best[:, :1], best.shape[-1], dtype=torch.int64)
    if rows.top_k is not None:
        num_kept = torch.where(rows.top_k > 0, rows.top_k.clamp(max=best.shape[-1]), num_kept)
    if rows.top_p is not None:
        rank = torch.arange(best.shape[-1], device=best.device)
        mass = (best - best[:, :1]).double().exp().masked_fill(rank >= num_kept, 0.0).cumsum(-1)
        before_enough = (mass < rows.top_p * mass[:, -1:]).sum(-1, keepdim=True)
        num_kept = torch.minimum(num_kept, before_enough + 1)
    return best.gather(1, num_kept - 1)


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """The index [B] at which the running sum of `weights` [B,V] (float32, >= 0) passes uniform · total."""
    size = weights.shape[-1]
    if size <= 2 * _BLOCK:
        return _search(weights.cumsum(-1, dtype=torch.float64), uniforms)[0]
    blocks = torch.nn.functional.pad(weights, (0, -size % _BLOCK)).unflatten(-1, (-1, _BLOCK))
    block, rest = _search(blocks.sum(-1, dtype=torch.float64).cumsum(-1), uniforms)
    inside = blocks[torch.arange(len(block), device=block.device), block].cumsum(-1, dtype=torch.float64)
    return block * _BLOCK + _locate(inside, rest)


def _search(running: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """The entry where `running` passes uniform · total, and how far into that entry it does."""
    target = uniforms * running[:, -1]
    index = _locate(running, target)
    start = running.gather(1, (index - 1).clamp(min=0)[:, None])[:, 0]
    return index, target - torch.where(index > 0, start, 0.0)


def _locate(running: Tensor, target: Tensor) -> Tensor:
    """First index whose running sum exceeds `target`, never past the last entry that has weight."""
    index = (running <= target[:, None]).sum(-1)
    last = (running < running[:, -1:]).sum(-1)
    return torch.minimum(index, last)
