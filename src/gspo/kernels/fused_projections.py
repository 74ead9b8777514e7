"""Linear layers that read the same input, run as one product: q, k and v of attention, gate and up of an MLP.

A decode step of a small batch is many short products, each with the cost of a kernel launch on a GPU; one wide product
replaces three. On a CPU wide products are faster in training too. The weights are laid side by side in one tensor and
remain the same parameters: training, saving and loading see no difference, and the wide product reads what they write.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.library import Library
from torch.nn import functional as F

from gspo.kernels.small_batch_linear import linear

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class FusedProjections:
    """The groups of siblings in a model.

    The first one made for a model moves its weights, so it must come before any CUDA graph is captured; a second one
    leaves them in place, and graphs captured in between stay valid.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers: list[nn.Linear] = []
        for parent in model.modules():
            for names in SIBLINGS:
                siblings = [m for name in names if type(m := getattr(parent, name, None)) is nn.Linear]
                if len(siblings) == len(names) and _can_be_fused(siblings):
                    if not all(map(_is_in_place, siblings)):
                        _lay_side_by_side(siblings)
                    self._layers += siblings

    def __len__(self) -> int:
        return len(self._layers)

    @contextmanager
    def active(self, *, trained: bool = False) -> Iterator[None]:
        """Within this the first layer of a group computes for all; with `trained` the product has gradients.

        That product has the same bits with gradients switched off: scoring and updating must agree.
        """
        if not all(map(_is_in_place, self._layers)):  # the wide product would read outdated weights
            raise RuntimeError("the model's weights were moved to other memory after they were laid side by side")
        for layer in self._layers:
            layer.__class__ = _TrainedSibling if trained else _Sibling
        try:
            yield
        finally:
            for layer in self._layers:
                layer.__class__ = nn.Linear


class _Wide:
    """The weights of a group in one tensor, and its latest product, until the last sibling has read its part."""

    def __init__(self, layers: Sequence[nn.Linear], weight: Tensor, bias: Tensor | None) -> None:
        self.layers = layers
        self.weight, self.bias = weight, bias
        self.input: Tensor | None = None
        self.product: Tensor | None = None


class _Sibling(nn.Linear):
    """A linear layer whose outputs are some columns of its group's product."""

    wide: _Wide
    first: int
    is_last: bool

    def forward(self, input: Tensor) -> Tensor:
        wide = self.wide
        product = wide.product
        if product is None or wide.input is not input:
            product = self.multiply(input)
            wide.input, wide.product = input, product
        if self.is_last:
            wide.input = wide.product = None
        return product.narrow(-1, self.first, self.out_features)

    def multiply(self, input: Tensor) -> Tensor:
        multiply = linear if input.device.type == "cpu" else F.linear
        return multiply(input, self.wide.weight, self.wide.bias)


class _TrainedSibling(_Sibling):
    """A sibling whose gradients reach the layers' own weights."""

    def multiply(self, input: Tensor) -> Tensor:
        wide, rows = self.wide, input.reshape(-1, input.shape[-1])
        product = torch.ops.gspo.wide_linear(rows, wide.weight, [m.weight for m in wide.layers])
        if wide.bias is not None:
            product = product + torch.cat([m.bias for m in wide.layers])
        return product.view(*input.shape[:-1], product.shape[-1])


def _wide_linear(rows: Tensor, wide: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return torch.mm(rows, wide.t())


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, wide, weights = inputs
    ctx.save_for_backward(rows, wide)
    ctx.sizes = [w.shape[0] for w in weights]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, wide = ctx.saved_tensors
    wants_rows, _, wants_weights = ctx.needs_input_grad
    grad_rows = torch.mm(grad, wide) if wants_rows else None
    if not any(wants_weights):
        return grad_rows, None, [None] * len(ctx.sizes)
    return grad_rows, None, list(torch.mm(grad.t(), rows).split(ctx.sizes))


_LIBRARY = Library("gspo", "FRAGMENT")
_LIBRARY.define("wide_linear(Tensor rows, Tensor wide, Tensor[] weights) -> Tensor")
_LIBRARY.impl("wide_linear", _wide_linear, "CompositeExplicitAutograd")
torch.library.register_autograd("gspo::wide_linear", _backward, setup_context=_save)


def _can_be_fused(siblings: Sequence[nn.Linear]) -> bool:
    kinds = {(m.in_features, m.bias is None, m.weight.dtype, m.weight.device) for m in siblings}
    return len(kinds) == 1 and len({id(m.weight) for m in siblings}) == len(siblings)


@torch.no_grad()
def _lay_side_by_side(siblings: Sequence[nn.Linear]) -> None:
    weights: list[Tensor] = [m.weight for m in siblings]
    biases: list[Tensor] = [m.bias for m in siblings if m.bias is not None]
    wide = _Wide(tuple(siblings), torch.cat(weights), torch.cat(biases) if biases else None)
    first = 0
    for layer in siblings:
        layer.weight.data = wide.weight.narrow(0, first, layer.out_features)
        if wide.bias is not None:
            layer.bias.data = wide.bias.narrow(0, first, layer.out_features)
        layer.__dict__.update(wide=wide, first=first, is_last=layer is siblings[-1])
        first += layer.out_features


def _is_in_place(layer: nn.Linear) -> bool:
    """Whether the layer's weights are still a part of the wide tensor."""
    wide: _Wide | None = layer.__dict__.get("wide")
    if wide is None:
        return False
    return layer.weight.data_ptr() == wide.weight[layer.__dict__["first"] :].data_ptr()
