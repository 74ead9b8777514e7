"""Log-probs of chosen tokens and entropies in one pass over the logits, and their gradient in another."""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.kernels.cpu_library import is_cpu_float32, kernels, library


def supports(logits: Tensor) -> bool:
    """Whether the kernel runs on these logits: float32 on a CPU, and the kernels were compiled."""
    return is_cpu_float32(logits) and library() is not None


class ChosenLogProbs(torch.autograd.Function):
    """Log-probs [N] of `targets` [N] and entropies [N] of logits [N,V]; the backward needs only the logits."""

    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, targets = logits.contiguous(), targets.long().contiguous()
        if len(targets) and not 0 <= int(targets.min()) <= int(targets.max()) < logits.shape[1]:
            raise IndexError(f"token {_first_outside(targets, logits.shape[1])} of a vocabulary of {logits.shape[1]}")
        chosen, entropies, logs = (logits.new_empty(len(logits)) for _ in range(3))
        kernels().gspo_chosen(*(x.data_ptr() for x in (logits, targets, chosen, entropies, logs)), *logits.shape)
        ctx.save_for_backward(logits, targets, entropies, logs)
        ctx.set_materialize_grads(False)
        return chosen, entropies

    @staticmethod
    def backward(ctx, grad_chosen: Tensor | None, grad_entropies: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        logits, targets, entropies, logs = ctx.saved_tensors
        grad_chosen = torch.zeros_like(entropies) if grad_chosen is None else grad_chosen.contiguous()
        grad_entropies = None if grad_entropies is None else grad_entropies.contiguous()
        out = torch.empty_like(logits)
        kernels().gspo_chosen_backward(
            *(x.data_ptr() for x in (logits, targets, entropies, logs, grad_chosen)),
            None if grad_entropies is None else grad_entropies.data_ptr(), out.data_ptr(), *logits.shape,
        )  # fmt: skip
        return out, None


def _first_outside(targets: Tensor, size: int) -> int:
    return int(targets[(targets < 0) | (targets >= size)][0])
