"""KV pages: keys and values of all running rows in one pool, a page at a time, so that memory follows use.

A row owns pages for the tokens it has. The full pages of a prompt are shared by the responses of its group; only the
last, half-filled one is copied. Page 0 is never allocated: rows that are done write there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gspo.kernels.sizes import PAGE
from gspo.rollout.native.cache_attention import register_cache


class OutOfPages(Exception):
    """Too few pages are free."""


class LengthsNeeded(Exception):
    """The host must know the lengths of the contexts: flash attention does not run these heads."""


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
    places: Tensor  # [N] page · PAGE + position in the page
    longest: int  # no context has more tokens
    lengths: list[int] | None  # None while a graph is captured that will run contexts of any lengths


@dataclass(slots=True, eq=False, weakref_slot=True)
class PagedKV:
    """The pages of all layers, and what the next forward does: a prefill, or a decode step of the rows of `table`."""

    layers: list[tuple[Tensor, Tensor]]  # keys, values: [pages, PAGE, key heads, size]
    blocks: list[Tensor]  # the same memory: [layers · 2, pages, PAGE, key heads, size], layers of one shape together
    prefill: PackedContexts | None = None
    table: Tensor | None = None  # [N, pages per row] int32
    lengths: Tensor | None = None  # [N]
    places: Tensor | None = (
        None  # [N], when tokens of one context are rows of `table`: keys are stored before any is read
    )
    next_layer: int = 0
    number: int = field(init=False)  # by which the model reaches it

    def __post_init__(self) -> None:
        self.number = register_cache(self)

    @staticmethod
    def over(memory: Tensor, shapes: Sequence[tuple[int, int]], num_pages: int, dtype: torch.dtype) -> PagedKV:
        """Pages in `memory` (bytes) for layers with these numbers and sizes of key heads."""
        blocks, first = {}, 0
        for shape, num in Counter(shapes).items():
            num_bytes = 2 * num * num_pages * PAGE * shape[0] * shape[1] * dtype.itemsize
            part = memory[first : first + num_bytes].view(dtype)
            blocks[shape] = part.view(2 * num, num_pages, PAGE, *shape)
            first += num_bytes
        parts = {shape: iter(block) for shape, block in blocks.items()}
        return PagedKV([(next(parts[s]), next(parts[s])) for s in shapes], list(blocks.values()))

    def copy(self, sources: Tensor, targets: Tensor) -> None:
        """Copy whole pages."""
        for block in self.blocks:
            block[:, targets] = block[:, sources]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, window: int) -> Tensor:
        """Attention [N, heads, size] of the packed tokens in the next layer; stores their keys and values."""
        keys, values = self.layers[self.next_layer]
        self.next_layer += 1
        if self.prefill is None:
            from gspo.kernels.triton_decode import paged_decode_attention

            assert self.table is not None and self.lengths is not None
            if self.places is not None:
                _store(keys, values, key, value, self.places)
            return paged_decode_attention(
                query, key, value, keys, values, self.table, self.lengths,
                scale=scale, softcap=softcap, window=window,
            )  # fmt: skip
        _store(keys, values, key, value, self.prefill.places)
        return attend_packed(self.prefill, query, key, value, scale, softcap, window)


def _store(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, places: Tensor) -> None:
    """Write new keys and values [N, key heads, size] to their places in the pages of a layer."""
    for pages, new in ((keys, key), (values, value)):
        pages.view(-1, *pages.shape[2:]).index_copy_(0, places, new)


def packed_tokens(
    contexts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], firsts: Sequence[int] | None = None
) -> np.ndarray:
    """[3, N]: tokens, positions (from `firsts` on), and places in the pages (page · PAGE + position in the page)."""
    parts = []
    for context, own, first in zip(contexts, pages, firsts or [0] * len(contexts)):
        positions = np.arange(first, first + len(context))
        parts.append([context, positions, np.asarray(own)[positions // PAGE] * PAGE + positions % PAGE])
    return np.concatenate(parts, axis=1)


def attend_packed(
    packed: PackedContexts, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, window: int
) -> Tensor:
    """Causal attention of each context to itself. Everything is [N, heads, size]."""
    size = query.shape[-1]
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and not softcap and size % 8 == 0:
        left, right = (window - 1, 0) if window else (None, None)
        return torch.ops.aten._flash_attention_forward(
            query, key, value, packed.starts, packed.starts, packed.longest, packed.longest, 0.0, not window, False,
            scale=scale, window_size_left=left, window_size_right=right,
        )[0]  # fmt: skip
    if packed.lengths is None:
        raise LengthsNeeded
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
