"""The KV cache of the running slots: left-aligned rows of their own lengths, behind transformers' Cache interface."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from gspo.kernels.cpu_attention import decode_attend, padded_size
from gspo.rollout.native.cache_attention import register_cache
from gspo.rollout.native.decode_attention import attend_grouped
from gspo.rollout.native.shared_prompts import SharedPrompts

LayerKV = tuple[Tensor, Tensor]  # keys and values, [rows, heads, length, head size]

# More than the machine has may be reserved. Python has the name MAP_NORESERVE from 3.13 on.
_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)


class SlotCache(Cache):
    """Keys and values of `num_slots` sequences, at most `max_length` tokens each. Rows 0..B-1 are in use.

    A decode step writes one token per row in place, and attention reads the view [:B, :, :width] without a copy.
    Buffers are allocated at first use, with the heads and sizes that each layer turns out to have. On a CPU rows and
    positions that are never written take no memory. With `use_kernel` attention is gspo's CPU kernel, whose heads are
    padded to whole vectors.
    """

    def __init__(self, num_slots: int, max_length: int, use_kernel: bool = False) -> None:
        super().__init__(layers=[])
        self._use_kernel = use_kernel
        self.num_slots = num_slots
        self.max_length = max_length
        self._buffers: dict[int, LayerKV] = {}  # by layer
        self._positions: Tensor | None = None
        self._width = 0
        self._targets: dict[int, Tensor] = {}
        self.masks: dict[int | None, Tensor] = {}  # of the next step, by window, for `attend` without the kernel
        self._shared = SharedPrompts(num_slots)
        self._next_layer = 0

    @cached_property
    def number(self) -> int:
        """By which a model reaches this cache."""
        return register_cache(self)

    def begin_step(self, positions: Tensor, width: int) -> None:
        """Prepare one decode step: row b writes at `positions[b]` and reads its first `width` tokens."""
        self._positions, self._width = positions, width
        self._targets = {}
        self._next_layer = 0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float, window: int) -> Tensor:
        """Attention [B, heads, size] of one new token per row in the next layer; stores their keys and values."""
        layer = self._next_layer
        self._next_layer += 1
        if not self._use_kernel:
            keys, values = self.update(key[:, :, None], value[:, :, None], layer)
            return attend_grouped(query, keys, values, self.masks[window or None], scale)
        assert self._positions is not None, "begin_step() comes first"
        rows, chunks = self._shared.chunks(len(query))
        keys, values = self._buffers_of(layer, key[:, :, None], value[:, :, None])
        return decode_attend(query, key, value, keys, values, self._positions, rows, chunks, scale, window)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> LayerKV:
        """Write one token per row ([B, heads, 1, size]) and return what attention may read."""
        keys, values = self._buffers_of(layer_idx, key_states, value_states)
        return self._write(keys, key_states), self._write(values, value_states)

    def store(self, first_row: int, source_rows: Tensor, prefix: Sequence[LayerKV], lengths: Sequence[int]) -> None:
        """Copy prefilled prompts into consecutive rows: row first_row+i gets row source_rows[i] of `prefix`.

        Rows with the same source share `lengths[i]` tokens, which a kernel then reads once for all of them.
        """
        self._shared.place(first_row, source_rows.tolist(), lengths)
        last_row = first_row + len(source_rows)
        for layer_idx, prefilled in enumerate(prefix):
            for buffer, new in zip(self._buffers_of(layer_idx, *prefilled), prefilled):
                buffer[first_row:last_row, :, : new.shape[2], : new.shape[3]] = new[source_rows]

    def move(self, targets: Tensor, sources: Tensor, width: int) -> None:
        """Copy the first `width` tokens of rows `sources` over rows `targets`."""
        self._shared.move(targets.tolist(), sources.tolist())
        for buffer in chain.from_iterable(self._buffers.values()):
            read = buffer[:, :, :width]
            read[targets] = read[sources]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._width

    def _buffers_of(self, layer_idx: int, keys: Tensor, values: Tensor) -> LayerKV:
        """The buffers of a layer, made at first use with the heads and sizes of these keys and values."""
        if layer_idx not in self._buffers:
            self._buffers[layer_idx] = self._new_buffer(keys), self._new_buffer(values)
        return self._buffers[layer_idx]

    def _new_buffer(self, like: Tensor) -> Tensor:
        # Zeros, because masked positions are multiplied by a weight of 0 and must not hold NaN.
        size = padded_size(like.shape[3]) if self._use_kernel else like.shape[3]
        shape = (self.num_slots, like.shape[1], self.max_length, size)
        return _untouched_zeros(shape, like.dtype) if like.device.type == "cpu" else like.new_zeros(shape)

    def _write(self, buffer: Tensor, new: Tensor) -> Tensor:
        num_rows, num_heads, _, size = new.shape
        buffer.view(-1, size).index_copy_(0, self._flat_targets(num_rows, num_heads), new.reshape(-1, size))
        return buffer[:num_rows, :, : self._width]

    def _flat_targets(self, num_rows: int, num_heads: int) -> Tensor:
        """Where (row, head) writes in a buffer seen as [slot · head · position, size]; the same for most layers."""
        if num_heads not in self._targets:
            assert self._positions is not None, "begin_step() comes first"
            pairs = torch.arange(num_rows * num_heads, device=self._positions.device) * self.max_length
            self._targets[num_heads] = (pairs.view(-1, num_heads) + self._positions[:, None]).view(-1)
        return self._targets[num_heads]


def _untouched_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros whose pages the system provides when they are first written; torch.zeros writes all of them."""
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(*shape)


def layers_of(cache: DynamicCache) -> list[LayerKV]:
    """The keys and values that a prefill left in transformers' growing cache, layer by layer."""
    layers: list[LayerKV] = []
    for layer in cache.layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        assert keys is not None and values is not None, "every layer must be an attention layer"
        layers.append((keys, values))
    return layers
