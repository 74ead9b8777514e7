"""The gradient of a large output layer on a CPU, and of the embedding that shares its weight, in one piece of memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gspo.models.output_head import Head, wide_linear

FLOAT = 4  # bytes
MIN_ELEMENTS = 1 << 20  # of a weight whose zeros cost more than the bookkeeping of rows


class HeadGradient:
    """Where the gradient of a head's weight is summed while `active`: in the memory of the step before.

    A gradient of the whole vocabulary is the largest tensor of a step. Made anew for every backward its pages have to be
    found and cleared, which takes longer than the product (docs/dev/performance-log.md). In half precision every row that is
    added rounds the sum again, so there, and on a GPU, it is left to autograd.
    """

    def __init__(self, head: Head) -> None:
        self._weight = weight = head.linear.weight
        self.pays = weight.device.type == "cpu" and weight.itemsize >= FLOAT and weight.numel() >= MIN_ELEMENTS
        self.is_active = False
        self._memory: Tensor | None = None

    def multiply(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """The product of the head, whose backward may add to the weight's gradient itself."""
        if not self.pays:
            return wide_linear(hidden, weight)
        rows = _Product.apply(hidden.reshape(-1, hidden.shape[-1]), weight, self)
        return rows.view(*hidden.shape[:-1], -1)

    @contextmanager
    def active(self, decoder: Any) -> Iterator[None]:
        """Around backwards that reach the head. An embedding of the same weight then adds its tokens' rows alone.

        Otherwise autograd fills a gradient of the whole vocabulary with zeros and adds all of it. An embedding's
        gradient without the head's would be left as rows.
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
