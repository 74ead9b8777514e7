"""KV pages: keys and values of all running rows in one pool, a page at a time, so that memory follows use.

A row owns pages for the tokens it has; the whole pages of a prompt are shared by the responses of its group, and only
the last, half-filled one is copied. Page 0 is nobody's: rows that stand still write there.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.library import Library
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from gspo.kernels.attention_swap import refuse_unsupported

PAGE = 16  # tokens a page
# transformers' attention → what replaces it while pages are in use. Its sdpa leaves out a softcap, its eager does not.
PAGED = {"sdpa": "gspo_paged", "eager": "gspo_paged_softcap"}


class OutOfPages(Exception):
    """No page is free."""


class PageBook:
    """Who holds which page: a stack of free ones and a count of holders for the others."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, 0, -1))
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, num: int) -> list[int]:
        """`num` free pages, held once; none when there are too few."""
        if num > len(self._free):
            raise OutOfPages
        pages = [self._free.pop() for _ in range(num)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        for page in pages:
            self._holders[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Let go; a page that nobody holds is free again."""
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)


@dataclass(frozen=True, slots=True)
class PackedContexts:
    """The tokens of a prefill, one context after another, and the place of each in the pages."""

    starts: Tensor  # [contexts + 1] int32
    lengths: list[int]
    places: Tensor  # [N] page · PAGE + slot


@dataclass(slots=True, eq=False, weakref_slot=True)
class PagedKV:
    """The pools of all layers, and what the next forward does with them: a prefill, or a decode step of `table`'s rows."""

    layers: list[tuple[Tensor, Tensor]]  # keys, values: [pages, PAGE, key heads, size]
    prefill: PackedContexts | None = None
    table: Tensor | None = None  # [N, pages a row] int32
    lengths: Tensor | None = None  # [N]
    layer: int = 0  # the one whose attention comes next
    number: int = field(default_factory=lambda: next(NUMBERS))

    def __post_init__(self) -> None:
        CACHES[self.number] = self

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, window: int
    ) -> Tensor:
        """Attention [N, heads, size] of the packed tokens in the next layer; their keys and values are stored.

        Layers are counted, not named: layers that are told their number would have to be compiled one by one.
        """
        keys, values = self.layers[self.layer]
        self.layer += 1
        if self.prefill is None:
            from gspo.kernels.triton_decode import paged_decode_attention

            assert self.table is not None and self.lengths is not None
            return paged_decode_attention(
                query, key, value, keys, values, self.table, self.lengths,
                scale=scale, softcap=softcap, window=window,
            )  # fmt: skip
        for pool, new in ((keys, key), (values, value)):
            pool.view(-1, *pool.shape[2:]).index_copy_(0, self.prefill.places, new)
        return attend_packed(self.prefill, query, key, value, scale, softcap, window)


class AttendingCache(Protocol):
    """What a model attends through when it is given the cache's number: the tokens' own keys and values are stored."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, window: int
    ) -> Tensor: ...


NUMBERS = itertools.count()
CACHES: weakref.WeakValueDictionary[int, AttendingCache] = weakref.WeakValueDictionary()


def _paged_attention(
    query: Tensor, key: Tensor, value: Tensor, cache: int, scale: float, softcap: float, window: int
) -> Tensor:
    """Attention through cache number `cache`, which changes behind the compiler's back, as only this op reads it."""
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


def attend_packed(
    packed: PackedContexts,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    softcap: float,
    window: int,
) -> Tensor:
    """Causal attention of each context to itself. Everything is [N, heads, size]."""
    size = query.shape[-1]
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not softcap and size % 8 == 0:
        longest = max(packed.lengths)
        left, right = (window - 1, 0) if window else (None, None)
        return torch.ops.aten._flash_attention_forward(
            query, key, value, packed.starts, packed.starts, longest, longest, 0.0, not window, False,
            scale=scale, window_size_left=left, window_size_right=right,
        )[0]  # fmt: skip
    parts = [x.split(packed.lengths) for x in (query, key, value)]
    return torch.cat([_attend_one(q, k, v, scale, softcap, window) for q, k, v in zip(*parts)])


def _attend_one(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, window: int
) -> Tensor:
    """Causal attention of one context to itself, [tokens, heads, size]."""
    repeat, num = query.shape[1] // key.shape[1], query.shape[0]
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    k, v = (x.repeat_interleave(repeat, dim=0) for x in (k, v))
    distance = torch.arange(num, device=q.device)[:, None] - torch.arange(num, device=q.device)
    hidden = (distance < 0) | (distance >= window if window else False)
    if not softcap:
        mask = torch.zeros(num, num, dtype=q.dtype, device=q.device).masked_fill(hidden, -torch.inf)
        return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(0, 1)
    scores = torch.tanh(q @ k.transpose(1, 2) * scale / softcap) * softcap
    weights = scores.float().masked_fill(hidden, -torch.inf).softmax(-1).to(q.dtype)
    return (weights @ v).transpose(0, 1)


def _attend_layer(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: int,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of packed tokens: query [1, heads, N, size], key and value the new tokens' own; gives [1, N, heads, size]."""
    refuse_unsupported(module, kwargs)
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = q.shape[-1] ** -0.5 if scaling is None else scaling
    out = torch.ops.gspo.paged_attention(q, k, v, paged, scale, softcap or 0.0, sliding_window or 0)
    return out[None], None


def _attend_sdpa(*args: Any, softcap: float | None = None, **kwargs: Any) -> tuple[Tensor, None]:
    return _attend_layer(*args, **kwargs)


AttentionInterface.register(PAGED["sdpa"], _attend_sdpa)
AttentionInterface.register(PAGED["eager"], _attend_layer)
