"""KV pages: keys and values of all running rows in one pool, a page at a time, so that memory follows use.

A row owns pages for the tokens it has. The full pages of a prompt are shared by the responses of its group; only the
last, half-filled one is copied. Page 0 is never allocated: rows that are done write there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gspo.rollout.native.cache_attention import register_cache


class OutOfPages(Exception):
    """Too few pages are free."""


class PageAllocator:
    """Which pages are in use: a stack of free ones and a reference count for the others."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages - 1, 0, -1))
        self._num_references = [0] * num_pages

    @property
    def num_usable(self) -> int:
        """Pages that can be allocated: all but page 0."""
        return max(0, len(self._num_references) - 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, num: int) -> list[int]:
        """`num` free pages, referenced once; OutOfPages, with no effect, when there are too few."""
        if num > len(self._free):
            raise OutOfPages
        pages = [self._free.pop() for _ in range(num)]
        for page in pages:
            self._num_references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Add a reference to each page."""
        for page in pages:
            self._num_references[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Remove a reference from each page; a page without references is free again."""
        for page in pages:
            self._num_references[page] -= 1
            if not self._num_references[page]:
                self._free.append(page)


@dataclass(frozen=True, slots=True)
class PackedContexts:
    """The tokens of a prefill, one context after another, and the place of each in the pages."""

    starts: Tensor  # [contexts + 1] int32
    lengths: list[int]
    places: Tensor  # [N] page · PAGE + position in the page


@dataclass(slots=True, eq=False, weakref_slot=True)
class PagedKV:
    """The pages of all layers, and what the next forward does: a prefill, or a decode step of the rows of `table`."""

    layers: list[tuple[Tensor, Tensor]]  # keys, values: [pages, PAGE, key heads, size]
    prefill: PackedContexts | None = None
    table: Tensor | None = None  # [N, pages per row] int32
    lengths: Tensor | None = None  # [N]
    next_layer: int = 0
    number: int = field(init=False)  # by which the model reaches it

    def __post_init__(self) -> None:
        self.number = register_cache(self)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, window: int) -> Tensor:
        """Attention [N, heads, size] of the packed tokens in the next layer; stores their keys and values."""
        keys, values = self.layers[self.next_layer]
        self.next_layer += 1
        if self.prefill is None:
            from gspo.kernels.triton_decode import paged_decode_attention

            assert self.table is not None and self.lengths is not None
            return paged_decode_attention(
                query, key, value, keys, values, self.table, self.lengths,
                scale=scale, softcap=softcap, window=window,
            )  # fmt: skip
        for pages, new in ((keys, key), (values, value)):
            pages.view(-1, *pages.shape[2:]).index_copy_(0, self.prefill.places, new)
        return attend_packed(self.prefill, query, key, value, scale, softcap, window)


def attend_packed(
    packed: PackedContexts, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, window: int
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


def _attend_one(query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, window: int) -> Tensor:
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
