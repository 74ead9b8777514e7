"""What gspo.kernels.triton_decode does, in plain torch: stands in for it where there is no GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gspo.rollout.counter_noise import uniform
from gspo.rollout.token_sampling import draw


def paged_decode_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    table: Tensor,
    lengths: Tensor,
    *,
    scale: float,
    softcap: float = 0.0,
    window: int = 0,
) -> Tensor:
    page = k_pages.shape[1]
    group = query.shape[1] // key.shape[1]
    out = torch.empty_like(query)
    for row, length in enumerate(lengths.tolist()):
        place = table[row, length // page].item(), length % page
        k_pages[place], v_pages[place] = key[row], value[row]
        low = max(0, length - window + 1) if window else 0
        seen = torch.arange(low, length + 1)
        where = table[row].long()[seen // page], seen % page
        k, v = (pool[where].repeat_interleave(group, dim=1) for pool in (k_pages, v_pages))
        scores = torch.einsum("hd,nhd->hn", query[row], k) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        out[row] = torch.einsum("hn,nhd->hd", scores.softmax(-1), v)
    return out


def draw_tokens(logits: Tensor, slots: Any, *, temperature: float, greedy: bool, cut: Tensor | None = None) -> None:
    num = len(logits)
    scores = logits / temperature
    length = slots.length[:num]
    if greedy:
        token = scores.argmax(-1)
    else:
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        if cut is not None:
            weights = weights.masked_fill(scores < cut, 0.0)
        token = draw(weights, uniform(slots.key[:num], length - slots.first[:num]))
    log_prob = scores.log_softmax(-1).gather(1, token[:, None])[:, 0]
    slots.record(token, log_prob)
