"""Linear layers over a few dozen rows on a CPU, whose library spreads the product over cores only from 64 rows on.

x Wᵀ is then computed as (W xᵀ)ᵀ: its many rows are those of W, and all cores have work. With 2 threads a product of 16
rows takes 0.4 to 0.6 of the time (docs/performance.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FEWEST, MOST = 12, 56  # rows between which turning the product round was seen to pay


class FewRows:
    """The linear layers of a model on a CPU. Their weights stay where they are."""

    def __init__(self, model: nn.Module) -> None:
        self._members = [m for m in model.modules() if type(m) is nn.Linear and _suits(m.weight)]

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this, and without gradients, products of few rows are turned round."""
        members = self._members if torch.get_num_threads() > 1 else []
        for member in members:
            member.__class__ = _Turned
        try:
            yield
        finally:
            for member in members:
                member.__class__ = nn.Linear


class _Turned(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        if not FEWEST <= input.numel() // self.in_features <= MOST:
            return F.linear(input, self.weight, self.bias)
        columns = torch.mm(self.weight, input.reshape(-1, self.in_features).t())
        out = columns.t().contiguous().view(*input.shape[:-1], self.out_features)
        return out if self.bias is None else out.add_(self.bias)


def _suits(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32
