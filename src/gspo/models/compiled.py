"""Decoder layers compiled, in use only where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer


class CompiledLayers:
    """The repeated layers of a model and one compiled forward for each class of them.

    Layers of a class share their code and differ in their weights, which a compiled forward takes as inputs: the first
    layer pays for all. A whole model takes minutes to compile, a layer seconds; what is lost is one fusion a layer.
    """

    def __init__(self, model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
        self._layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        self._forwards: dict[type, Callable[..., Any]] = {
            kind: torch.compile(kind.forward, dynamic=True, backend=backend)
            for kind in {type(m) for m in self._layers}
        }

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this the layers run compiled."""
        for layer in self._layers:
            layer.forward = partial(self._forwards[type(layer)], layer)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.__dict__.pop("forward", None)


def worth_compiling(model: nn.Module) -> bool:
    """Dense decoders on a GPU, unless the same bits are wanted in every process.

    Experts route tokens by their values, which compiled code handles in pieces; and a compiled kernel chooses how it
    sums by measuring, so two processes may choose differently.
    """
    parameter = next(model.parameters())
    is_dense = not any("experts" in name for name, _ in model.named_modules())
    return parameter.is_cuda and is_dense and not torch.are_deterministic_algorithms_enabled()
