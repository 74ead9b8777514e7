"""Linear layers that read the same input, run as one product: q, k and v of attention, gate and up of an MLP.

A decode step of a small batch is a long row of short products, each of which costs a GPU its start; one wide product
does the work of three. On a CPU wide products are faster in training too. Their weights are laid side by side in one
piece of memory and stay the parameters they were: whoever trains, saves or loads them finds them as before, and what is
written to them is what the wide product reads.
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

    Making the first of a model moves weights, so it comes before any CUDA graph does; a second leaves them there, and
    what the first one's engine captured stays good.
    """

    def __init__(self, model: nn.Module) -> None:
        self._members: list[nn.Linear] = []
        for parent in model.modules():
            for names in SIBLINGS:
                members = [m for name in names if type(m := getattr(parent, name, None)) is nn.Linear]
                if len(members) == len(names) and _are_alike(members):
                    if not all(map(_is_in_place, members)):
                        _lay_side_by_side(members)
                    self._members += members

    def __len__(self) -> int:
        return len(self._members)

    @contextmanager
    def active(self, *, trained: bool = False) -> Iterator[None]:
        """Within this the first of a group computes for all; `trained` by a product that gives gradients.

        That product is the same with gradients switched off, to the bit: scoring and updating must agree.
        """
        if not all(map(_is_in_place, self._members)):  # it would generate from weights of the past
            raise RuntimeError(
                "the model's weights were moved to other memory after they were laid side by side"
            )
        for member in self._members:
            member.__class__ = _TrainedSibling if trained else _Sibling
        try:
            yield
        finally:
            for member in self._members:
                member.__class__ = nn.Linear


class _Wide:
    """The weights of a group in one tensor, and its latest product, until the last sibling has taken its part."""

    def __init__(self, members: Sequence[nn.Linear], weight: Tensor, bias: Tensor | None) -> None:
        self.members = members
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
    """The same, whose gradients go to the weights that the product is made of."""

    def multiply(self, input: Tensor) -> Tensor:
        wide, rows = self.wide, input.reshape(-1, input.shape[-1])
        product = torch.ops.gspo.wide_linear(rows, wide.weight, [m.weight for m in wide.members])
        if wide.bias is not None:
            product = product + torch.cat([m.bias for m in wide.members])
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
    of_rows = torch.mm(grad, wide) if wants_rows else None
    if not any(wants_weights):
        return of_rows, None, None
    return of_rows, None, list(torch.mm(grad.t(), rows).split(ctx.sizes))


_LIBRARY = Library("gspo", "FRAGMENT")
_LIBRARY.define("wide_linear(Tensor rows, Tensor wide, Tensor[] weights) -> Tensor")
_LIBRARY.impl("wide_linear", _wide_linear, "CompositeExplicitAutograd")
torch.library.register_autograd("gspo::wide_linear", _backward, setup_context=_save)


def _are_alike(members: Sequence[nn.Linear]) -> bool:
    facts = {(m.in_features, m.bias is None, m.weight.dtype, m.weight.device) for m in members}
    return len(facts) == 1 and len({id(m.weight) for m in members}) == len(members)


@torch.no_grad()
def _lay_side_by_side(members: Sequence[nn.Linear]) -> None:
    weights: list[Tensor] = [m.weight for m in members]
    biases: list[Tensor] = [m.bias for m in members if m.bias is not None]
    wide = _Wide(tuple(members), torch.cat(weights), torch.cat(biases) if biases else None)
    first = 0
    for member in members:
        member.weight.data = wide.weight.narrow(0, first, member.out_features)
        if wide.bias is not None:
            member.bias.data = wide.bias.narrow(0, first, member.out_features)
        member.__dict__.update(wide=wide, first=first, is_last=member is members[-1])
        first += member.out_features


def _is_in_place(member: nn.Linear) -> bool:
    """Whether the layer's weights are those columns of the wide product that it takes."""
    wide: _Wide | None = member.__dict__.get("wide")
    if wide is None:
        return False
    return member.weight.data_ptr() == wide.weight[member.__dict__["first"] :].data_ptr()
