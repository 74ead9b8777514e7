"""Linear layers over a few dozen rows on a CPU, whose library spreads the product over cores only from 64 rows on.

A kernel of our own reads every weight once, as fast as memory gives them. Where it cannot be compiled, x Wᵀ is computed as
(W xᵀ)ᵀ: its many rows are those of W, and all cores have work (docs/dev/performance-log.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.library import Library
from torch.nn import functional as F

from gspo.kernels.cpu_library import fits, kernels, library

MOST_BY_KERNEL = 48  # rows that the kernel takes
FEWEST, MOST = 12, 56  # rows between which turning the product round was seen to pay


class SmallBatchLinear:
    """The linear layers of a model on a CPU. Their weights stay where they are."""

    def __init__(self, model: nn.Module) -> None:
        self._members = [m for m in model.modules() if type(m) is nn.Linear and fits(m.weight)]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this, and without gradients, products of few rows are computed by `linear`."""
        members = [m for m in self._members if type(m) is nn.Linear]
        for member in members:
            member.__class__ = _SmallBatchModule
        try:
            yield
        finally:
            for member in members:
                member.__class__ = nn.Linear


class _SmallBatchModule(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As F.linear without gradients. To a compiler it is one operation, whatever the number of rows."""
    multiply = torch.ops.gspo.few_rows_linear if torch.compiler.is_compiling() else _linear
    rows = multiply(input.reshape(-1, input.shape[-1]), weight, bias)
    return rows.view(*input.shape[:-1], weight.shape[0])


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    num = input.shape[0]
    if 1 < num <= MOST_BY_KERNEL and library() and fits(weight) and weight.is_contiguous():
        input, out = input.contiguous(), input.new_empty(num, weight.shape[0])
        kernels().gspo_few_rows(
            input.data_ptr(), weight.data_ptr(), out.data_ptr(), num, weight.shape[0], weight.shape[1]
        )
    elif FEWEST <= num <= MOST and torch.get_num_threads() > 1:
        out = torch.mm(weight, input.t()).t().contiguous()
    else:
        return F.linear(input, weight, bias)
    return out if bias is None else out.add_(bias)


def _like_linear(input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return input.new_empty(input.shape[0], weight.shape[0])


_LIBRARY = Library("gspo", "FRAGMENT")
_LIBRARY.define("few_rows_linear(Tensor input, Tensor weight, Tensor? bias) -> Tensor")
_LIBRARY.impl("few_rows_linear", _linear, "CPU")
_LIBRARY.impl("few_rows_linear", _like_linear, "Meta")
