"""The output layer on a GPU in half precision: float32 logits, chunk by chunk, recomputed in the backward.

Products of half-precision numbers are summed in float32 and never rounded, so log-probs equal those of float32 weights;
gradients of logits are rounded to the weights' precision, as in autograd. One kernel reads a chunk of logits once for
its log-probs and entropies, another turns a chunk into its gradient.
"""

# A kernel is launched as kernel[grid](…), which type checkers report as indexing a function.
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gspo.kernels.sizes import FUSED_CHUNK_ELEMENTS

BLOCK = 2048


@triton.jit
def _row_stats(logits, targets, chosen, log_totals, entropies, factor, vocab, BLOCK: tl.constexpr):
    """For one row of logits · factor: log Σ exp, the log-prob of its target, and the entropy."""
    row = tl.program_id(0).to(tl.int64)
    peak = -float("inf")
    total = 0.0
    weighted = 0.0
    for start in range(0, vocab, BLOCK):
        v = start + tl.arange(0, BLOCK)
        x = tl.load(logits + row * vocab + v, mask=v < vocab, other=-float("inf")) * factor
        higher = tl.maximum(peak, tl.max(x, 0))
        weights = tl.exp(x - higher)
        fade = tl.exp(peak - higher)
        total = total * fade + tl.sum(weights, 0)
        weighted = weighted * fade + tl.sum(tl.where(v < vocab, weights * x, 0.0), 0)
        peak = higher
    log_total = peak + tl.log(total)
    target = tl.load(targets + row)
    tl.store(log_totals + row, log_total)
    tl.store(chosen + row, tl.load(logits + row * vocab + target) * factor - log_total)
    tl.store(entropies + row, log_total - weighted / total)


@triton.jit
def _row_grads(
    logits, targets, log_totals, entropies, grad_chosen, grad_entropy, out, factor, vocab,
    HAS_ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one block of one row of logits: factor · (g (1[target] - p) - h p (log p + H))."""
    row = tl.program_id(0).to(tl.int64)
    v = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = v < vocab
    log_p = tl.load(logits + row * vocab + v, mask=inside, other=0.0) * factor - tl.load(log_totals + row)
    p = tl.exp(log_p)
    hit = (v == tl.load(targets + row)).to(tl.float32)
    grad = tl.load(grad_chosen + row) * (hit - p)
    if HAS_ENTROPY:
        grad -= tl.load(grad_entropy + row) * p * (log_p + tl.load(entropies + row))
    tl.store(out + row * vocab + v, (grad * factor).to(out.dtype.element_ty), mask=inside)


class ChosenLogProbs(torch.autograd.Function):
    """(hidden [N,H], weight [V,H], targets [N], factor) → log-probs [N] and entropies [N] of hidden·weightᵀ·factor."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, factor: float):  # pyright: ignore[reportIncompatibleMethodOverride]
        chosen, log_totals, entropies = torch.empty(
            3, hidden.shape[0], dtype=torch.float32, device=hidden.device
        ).unbind(0)
        for part in _parts(hidden, weight):
            logits = torch.mm(hidden[part], weight.t(), out_dtype=torch.float32)
            rows, vocab = logits.shape
            _row_stats[(rows,)](
                logits, targets[part], chosen[part], log_totals[part], entropies[part], factor, vocab, BLOCK=BLOCK
            )
            del logits
        ctx.save_for_backward(hidden, weight, targets, log_totals, entropies)
        ctx.factor = factor
        ctx.set_materialize_grads(False)
        return chosen, entropies

    @staticmethod
    def backward(ctx, grad_chosen: Tensor | None, grad_entropy: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, targets, log_totals, entropies = ctx.saved_tensors
        grad_chosen = torch.zeros_like(log_totals) if grad_chosen is None else grad_chosen.contiguous()
        entropy = entropies if grad_entropy is None else grad_entropy.contiguous()
        grad_hidden, grad_weight = torch.empty_like(hidden), None
        for part in _parts(hidden, weight):
            logits = torch.mm(hidden[part], weight.t(), out_dtype=torch.float32)
            rows, vocab = logits.shape
            grads = torch.empty(rows, vocab, dtype=weight.dtype, device=weight.device)
            _row_grads[(rows, triton.cdiv(vocab, BLOCK))](
                logits, targets[part], log_totals[part], entropies[part], grad_chosen[part], entropy[part], grads,
                ctx.factor, vocab, HAS_ENTROPY=grad_entropy is not None, BLOCK=BLOCK,
            )  # fmt: skip
            del logits
            torch.mm(grads, weight, out=grad_hidden[part])
            if ctx.needs_input_grad[1]:
                grad_weight = _add_product(grad_weight, grads.t(), hidden[part])
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        return grad_hidden, grad_weight, None, None


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """`total` + left · right in float32."""
    if total is None:
        return torch.mm(left, right, out_dtype=torch.float32)
    return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)


def _parts(hidden: Tensor, weight: Tensor) -> list[slice]:
    """Equal parts of the rows, of at most FUSED_CHUNK_ELEMENTS logits each; depends on sizes only."""
    num, most = hidden.shape[0], max(1, FUSED_CHUNK_ELEMENTS // weight.shape[0])
    size = -(-num // -(-num // most)) if num else 1
    return [slice(start, min(start + size, num)) for start in range(0, num, size)]
