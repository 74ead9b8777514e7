"""Fast CPU linear layers for at most 48 rows; BLAS uses one core below 64.

Our kernel reads every weight once, at the speed of memory. Where it cannot be compiled, x Wᵀ is computed as (W xᵀ)ᵀ:
the rows of that product are those of W, so all cores have work (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.library import Library
from torch.nn import functional as F

from gspo.kernels.cpu_library import is_cpu_float32, kernels, library

MAX_KERNEL_ROWS = 48
MIN_TRANSPOSED_ROWS, MAX_TRANSPOSED_ROWS = 12, 56  # where the transposed product was measured to be faster


class SmallBatchLinear:
    """The float32 linear layers of a model on a CPU. Their weights are not moved."""

    def __init__(self, model: nn.Module) -> None:
        self._layers = [m for m in model.modules() if type(m) is nn.Linear and is_cpu_float32(m.weight)]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this, and without gradients, the layers compute by `linear`."""
        layers = [m for m in self._layers if type(m) is nn.Linear]
        for layer in layers:
            layer.__class__ = _SmallBatchModule
        try:
            yield
        finally:
            for layer in layers:
                layer.__class__ = nn.Linear


class _SmallBatchModule(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear without gradients. Compiled code sees one operation, whatever the number of rows."""
    multiply = torch.ops.gspo.small_batch_linear if torch.compiler.is_compiling() else _linear
    rows = multiply(input.reshape(-1, input.shape[-1]), weight, bias)
    return rows.view(*input.shape[:-1], weight.shape[0])


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num = input.shape[0]
    if 1 < num <= MAX_KERNEL_ROWS and library() and is_cpu_float32(weight) and weight.is_contiguous():
        input, out = input.contiguous(), input.new_empty(num, weight.shape[0])
        kernels().gspo_small_batch_linear(
            input.data_ptr(), weight.data_ptr(), out.data_ptr(), num, weight.shape[0], weight.shape[1]
        )
    elif MIN_TRANSPOSED_ROWS <= num <= MAX_TRANSPOSED_ROWS and torch.get_num_threads() > 1:
        out = torch.mm(weight, input.t()).t().contiguous()
    else:
        return F.linear(input, weight, bias)
    return out if bias is None else out.add_(bias)


def _like_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[0])


_LIBRARY = Library("gspo", "FRAGMENT")
_LIBRARY.define("small_batch_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.impl("small_batch_linear", _linear, "CPU")
_LIBRARY.impl("small_batch_linear", _like_linear, "Meta")
