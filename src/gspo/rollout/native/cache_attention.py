"""Attention of a decode step through a KV cache that the model knows only by a number.

A compiled layer must not see the cache: its tensors, page tables and lengths change from step to step, and every change
of a traced object would compile the layer again. So the model is called with `paged=<number>`, which transformers hands
on to every attention function, and one opaque operation, `gspo::paged_attention`, looks the cache up in `CACHES` and
calls its `attend`. To the compiler that is a call with an integer; what happens behind it is plain Python.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.library import Library
from transformers import AttentionInterface

from gspo.kernels.attention_swap import refuse_unsupported

# transformers' attention → ours. Its sdpa leaves out a softcap, its eager does not.
CACHED = {"sdpa": "gspo_paged", "eager": "gspo_paged_softcap"}


class AttendingCache(Protocol):
    """A KV cache that computes attention itself."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, window: int) -> Tensor:
        """Attention [N, heads, size] of N new tokens in the next layer; stores their keys and values.

        The cache counts its layers: a layer called with its own number would have to be compiled by itself.
        """
        ...


CACHES: weakref.WeakValueDictionary[int, AttendingCache] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def register_cache(cache: AttendingCache) -> int:
    """The number by which a model reaches this cache for as long as something else refers to it."""
    number = next(_numbers)
    CACHES[number] = cache
    return number


def _paged_attention(
    query: Tensor, key: Tensor, value: Tensor, cache: int, scale: float, softcap: float, window: int
) -> Tensor:
    return CACHES[cache].attend(query, key, value, scale, softcap, window).contiguous()


def _like_attention(query: Tensor, *_: Any) -> Tensor:
    return query.new_empty(query.shape)


# Defined by hand: `custom_op` adds 100 µs to every call.
_LIBRARY = Library("gspo", "FRAGMENT")
_LIBRARY.define(
    "paged_attention(Tensor query, Tensor key, Tensor value, SymInt cache, float scale, float softcap, SymInt window) -> Tensor"
)
for _device in ("CPU", "CUDA"):
    _LIBRARY.impl("paged_attention", _paged_attention, _device)
_LIBRARY.impl("paged_attention", _like_attention, "Meta")


def _attend_layer(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *,
    paged: int, scaling: float | None = None, sliding_window: int | None = None, softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of packed new tokens: query, key and value [1, heads, N, size]; returns [1, N, heads, size]."""
    refuse_unsupported(module, kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = torch.ops.gspo.paged_attention(q, k, v, paged, scale, softcap or 0.0, sliding_window or 0)
    return out[None], None


def _attend_sdpa(*args: Any, softcap: float | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    return _attend_layer(*args, **kwargs)


AttentionInterface.register(CACHED["sdpa"], _attend_sdpa)
AttentionInterface.register(CACHED["eager"], _attend_layer)
