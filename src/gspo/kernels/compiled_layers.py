"""Decoder layers compiled by torch, in use only within a context."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._functorch import config as _functorch_config
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.kernels.cpu_library import compiler, is_cpu_float32

# A process holds a handful of variants of a layer's code (trained, frozen, decoding, each window, few or many tokens).
# torch keeps 8 and runs further ones uncompiled, so that bits would depend on which came first.
MAX_VARIANTS = 64
# On a CPU. Compiling takes about 30 s the first time; a smaller model saves only a few seconds in a hundred steps.
MIN_PARAMETERS = 4_000_000


class CompiledLayers:
    """The repeated layers of a model and one compiled forward for each class of them.

    Layers of a class share their code and differ in their weights, which are inputs of a compiled forward: only the
    first layer is compiled. A whole model takes minutes to compile, a layer seconds; the cost is one fusion per layer.
    """

    def __init__(self, model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_VARIANTS)
        self._layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        self._recomputes = next(model.parameters()).is_cuda
        self._forwards: dict[type, Callable[..., Any]] = {
            kind: torch.compile(kind.forward, dynamic=True, backend=backend) for kind in {type(m) for m in self._layers}
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this, inside `active`, the layers run uncompiled."""
        forwards = [layer.__dict__.pop("forward") for layer in self._layers]
        try:
            yield
        finally:
            for layer, forward in zip(self._layers, forwards):
                layer.forward = forward

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this the layers run compiled.

        On a GPU the backward recomputes what is cheap to compute: that saves a tenth of a large model's memory for 3 %
        of its step (docs/performance.md). Attention is not: it is an operation that torch
        does not know and is kept.
        """
        for layer in self._layers:
            layer.forward = partial(self._forwards[type(layer)], layer)
        try:
            recomputes = {"aggressive_recomputation": self._recomputes, "is_non_builtin_to_include": self._recomputes}
            with _functorch_config.patch(recomputes):
                yield
        finally:
            for layer in self._layers:
                layer.__dict__.pop("forward", None)


def worth_compiling(model: nn.Module) -> bool:
    """Whether to compile: dense decoders on a GPU, or large on a CPU; never under deterministic algorithms.

    Experts route tokens by their values, which compiled code handles in pieces. A kernel compiled for a GPU chooses the
    order of its sums by measuring, so two processes may choose differently.
    """
    if not is_dense(model) or torch.are_deterministic_algorithms_enabled():
        return False
    return next(model.parameters()).is_cuda or _pays_on_a_cpu(model)


def is_dense(model: nn.Module) -> bool:
    """Whether every token passes through all parameters: no experts."""
    return not any("experts" in name for name, _ in model.named_modules())


def _pays_on_a_cpu(model: nn.Module) -> bool:
    """Whether a model of this size and precision gains more than compiling costs, and there is a C++ compiler.

    Decided by the model and not by the length of a run: a run that is resumed for more steps keeps its bits.
    """
    parameters = list(model.parameters())
    return (
        all(map(is_cpu_float32, parameters))
        and sum(p.numel() for p in parameters) >= MIN_PARAMETERS
        and has_cpp_compiler()
    )


def has_cpp_compiler() -> bool:
    """Whether the compiler that torch would call exists; whether it works shows when it is called."""
    return compiler() is not None
