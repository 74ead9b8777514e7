"""Log-probs and entropy of chosen tokens from hidden states, without logits [tokens, vocab] in memory."""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gspo.kernels import cpu_log_probs
from gspo.kernels.sizes import CHUNK_ELEMENTS, KEEP_ELEMENTS
from gspo.models.output_head import Head, halves_on_gpu


def chosen_log_probs(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy: bool = False,
    entropy_grad: bool = True,
    recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Float32 log-probs [N] of `targets` [N] after `hidden` [N,H], and with `entropy` the entropies [N].

    Chunks depend on sizes only, so scoring and training compute the same bits. With `recompute`, or for many tokens,
    the backward computes the logits again instead of keeping them.
    """
    if _has_kernel(head, hidden):
        from gspo.kernels.triton_log_probs import ChosenLogProbs

        log_probs, entropies = ChosenLogProbs.apply(hidden, head.linear.weight, targets, head.scale / temperature)
        if not entropy:
            return log_probs, None
        return log_probs, entropies if entropy_grad else entropies.detach()
    chunk = max(1, CHUNK_ELEMENTS // head.linear.out_features)
    recompute |= hidden.shape[0] * head.linear.out_features > KEEP_ELEMENTS
    recompute &= torch.is_grad_enabled()
    if hidden.shape[0] <= chunk and not (recompute and len(hidden)):
        return _chunk(head, hidden, targets, temperature, entropy, entropy_grad)
    parts = []
    for start in range(0, hidden.shape[0], chunk):
        part = slice(start, start + chunk)
        piece = (head, hidden[part], targets[part], temperature, entropy, entropy_grad)
        parts.append(checkpoint(_chunk, *piece, use_reentrant=False) if recompute else _chunk(*piece))
    log_probs = torch.cat([p[0] for p in parts])
    return log_probs, torch.cat([p[1] for p in parts if p[1] is not None]) if entropy else None


def _chunk(
    head: Head, hidden: Tensor, targets: Tensor, temperature: float, entropy: bool, entropy_grad: bool
) -> tuple[Tensor, Tensor | None]:
    logits = head.logits(hidden)
    if temperature != 1.0:
        logits = logits / temperature
    if cpu_log_probs.supports(logits):
        chosen, entropies = cpu_log_probs.ChosenLogProbs.apply(logits, targets)
        return chosen, (entropies if entropy_grad else entropies.detach()) if entropy else None
    log_probs = F.log_softmax(logits, dim=-1)
    chosen = log_probs.gather(-1, targets[:, None]).squeeze(-1)
    if not entropy:
        return chosen, None
    if not entropy_grad:  # a metric only: keep nothing for the backward
        log_probs = log_probs.detach()
    return chosen, -(log_probs.exp() * log_probs).sum(-1)


def _has_kernel(head: Head, hidden: Tensor) -> bool:
    """Whether the Triton kernel supports this head."""
    plain = head.softcap is None and head.linear.bias is None
    return plain and halves_on_gpu(hidden, head.linear.weight) and find_spec("triton") is not None
