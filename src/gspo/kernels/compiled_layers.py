"""Decoder layers compiled, in use only where they are asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._functorch import config as _functorch_config
from transformers.modeling_layers import GradientCheckpointingLayer

from gspo.kernels.cpu_library import compiler, fits

# A process holds a handful of variants of a layer's code (trained, frozen, decoding, each window, few or many tokens).
# torch keeps 8 and runs the next as they are, whose bits would depend on what came first.
MAX_VARIANTS = 64
# On a CPU. Compiling takes some 30 s the first time, which the few seconds that a run of a smaller model saves in a
# hundred steps do not pay for.
MIN_PARAMETERS = 4_000_000


class CompiledLayers:
    """The repeated layers of a model and one compiled forward for each class of them.

    Layers of a class share their code and differ in their weights, which a compiled forward takes as inputs: the first
    layer pays for all. A whole model takes minutes to compile, a layer seconds; what is lost is one fusion a layer.
    """

    def __init__(self, model: nn.Module, backend: str | Callable[..., Any] = "inductor") -> None:
        dynamo = torch._dynamo.config
        dynamo.recompile_limit = max(dynamo.recompile_limit, MAX_VARIANTS)
        self._layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
        self._recomputes = next(model.parameters()).is_cuda
        self._forwards: dict[type, Callable[..., Any]] = {
            kind: torch.compile(kind.forward, dynamic=True, backend=backend)
            for kind in {type(m) for m in self._layers}
        }

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within this, inside `active`, the layers run as they are."""
        forwards = [layer.__dict__.pop("forward") for layer in self._layers]
        try:
            yield
        finally:
            for layer, forward in zip(self._layers, forwards):
                layer.forward = forward

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this the layers run compiled.

        What is cheap to compute again is not kept for the backward: a tenth of a large model's memory for 3 % of its
        step (docs/dev/performance-log.md).
        """
        for layer in self._layers:
            layer.forward = partial(self._forwards[type(layer)], layer)
        try:
            with _functorch_config.patch(aggressive_recomputation=self._recomputes):
                yield
        finally:
            for layer in self._layers:
                layer.__dict__.pop("forward", None)


def worth_compiling(model: nn.Module) -> bool:
    """Dense decoders on a GPU, and on a CPU from some size on; not if only deterministic algorithms are wanted.

    Experts route tokens by their values, which compiled code handles in pieces; and a kernel compiled for a GPU chooses
    how it sums by measuring, so two processes may choose differently.
    """
    if not is_dense(model) or torch.are_deterministic_algorithms_enabled():
        return False
    return next(model.parameters()).is_cuda or _pays_on_a_cpu(model)


def is_dense(model: nn.Module) -> bool:
    """Whether every token goes through all of the model."""
    return not any("experts" in name for name, _ in model.named_modules())


def _pays_on_a_cpu(model: nn.Module) -> bool:
    """Whether a model of this size and precision gains more than compiling costs, where there is a C++ compiler.

    Decided by the model alone and not by the length of a run: a run that is resumed to go on further keeps its bits.
    """
    parameters = list(model.parameters())
    return (
        all(map(fits, parameters))
        and sum(p.numel() for p in parameters) >= MIN_PARAMETERS
        and has_cpp_compiler()
    )


def has_cpp_compiler() -> bool:
    """Whether the compiler that torch would call is there; whether it works turns out when it is called."""
    return compiler() is not None
