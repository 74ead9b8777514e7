"""The gradient of a large output layer on a CPU, and of an embedding tied to it, summed in reused memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gspo.models.output_head import Head, wide_linear

FLOAT = 4  # bytes
MIN_ELEMENTS = 1 << 20  # of a weight for which this is faster than autograd


class HeadGradient:
    """Sums the gradient of a head's weight, while `active`, in the memory of the previous step.

    This gradient is the largest tensor of a step. Allocating and clearing it for every backward takes longer than the
    product (docs/dev/performance-log.md). In half precision each added row would round the sum again, so there, and on
    a GPU, autograd computes it.
    """

    def __init__(self, head: Head) -> None:
        self._weight = weight = head.linear.weight
        self.pays = weight.device.type == "cpu" and weight.itemsize >= FLOAT and weight.numel() >= MIN_ELEMENTS
        self.is_active = False
        self._memory: Tensor | None = None

    def multiply(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """The product of the head. While `active`, its backward adds to the weight's gradient in place."""
        if not self.pays:
            return wide_linear(hidden, weight)
        rows = _Product.apply(hidden.reshape(-1, hidden.shape[-1]), weight, self)
        return rows.view(*hidden.shape[:-1], -1)

    @contextmanager
    def active(self, decoder: Any) -> Iterator[None]:
        """A context for backwards that reach the head. A tied embedding then adds only the rows of its tokens.

        Otherwise autograd would add a gradient of the whole vocabulary, mostly zeros. Without a backward through the
        head the embedding's gradient would stay sparse.
        """
        embedding = decoder.get_input_embeddings()
        shares = isinstance(embedding, nn.Embedding) and embedding.weight is self._weight
        adds_rows = self.pays and shares and not embedding.sparse
        self.is_active = self.pays
        if adds_rows:
            embedding.sparse = True
        try:
            yield
        finally:
            self.is_active = False
            if adds_rows:
                embedding.sparse = False

    def add(self, left: Tensor, right: Tensor) -> None:
        weight = self._weight
        if weight.grad is not None:
            weight.grad.addmm_(left, right)
            return
        if self._memory is None:
            self._memory = torch.empty_like(weight, memory_format=torch.contiguous_format)
        weight.grad = torch.mm(left, right, out=self._memory)


class _Product(torch.autograd.Function):
    """hidden · weightᵀ."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, gradient: HeadGradient) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(hidden, weight)
        ctx.gradient = gradient
        return wide_linear(hidden, weight)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight = ctx.saved_tensors
        of_hidden = torch.mm(grad, weight) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return of_hidden, None, None
        if not ctx.gradient.is_active:
            return of_hidden, torch.mm(grad.t(), hidden), None
        ctx.gradient.add(grad.t(), hidden)
        return of_hidden, None, None
