"""Causal attention over packed sequences with shared prefixes, as one operation that a compiler can take."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from gspo.kernels.cpu_library import Shape, fits, kernels, library

# Sequences of a prefix that one thread takes together. More than a few would leave threads idle.
CHUNK = 8
LANES = 16  # numbers of a vector


class PackedSequences(NamedTuple):
    """The sequences of a packed row, those that continue the same prefix side by side.

    One list of numbers, so that a compiler has one size to know: how many sequences and chunks there are, then of each
    sequence its start, length, start of the prefix and its length, and of each chunk its first sequence, how many, and
    where their prefix's gradients are summed.
    """

    table: Tensor

    @staticmethod
    def of(
        sequences: Sequence[tuple[int, int, int, int]], device: torch.device | str = "cpu"
    ) -> PackedSequences:
        """Of sequences given as start, length, start of the prefix, its length; `device` is the CPU."""
        ordered = sorted((s for s in sequences if s[1]), key=lambda s: s[2:])
        chunks, first, place = [], 0, 0
        for (_, size), members in groupby(ordered, key=lambda s: s[2:]):
            left = len(list(members))
            while left:
                count = min(left, CHUNK if size else 1)
                chunks.append((first, count, place))
                first, left, place = first + count, left - count, place + size
        return PackedSequences(
            torch.tensor([len(ordered), len(chunks), *chain(*ordered, *chunks)], device=device)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """Causal attention [N, heads, size] of every sequence to its keys; `window` counts the token itself."""
        return torch.ops.gspo.attend(q, k, v, self.table, scale, window or 0)[0]


class _Places(NamedTuple):
    """Where the lists of a table stand in memory."""

    sequences: int
    chunks: int
    num_chunks: int
    num_sums: int  # tokens of prefixes, once for every chunk

    @staticmethod
    def of(table: Tensor) -> _Places:
        num, num_chunks = table[:2].tolist()
        sequences, chunks = table[2 : 2 + 4 * num], table[2 + 4 * num :]
        num_sums = 0
        if num_chunks:
            first, _, place = chunks[-3:].tolist()
            num_sums = place + int(sequences[4 * first + 3])
        return _Places(sequences.data_ptr(), chunks.data_ptr(), num_chunks, num_sums)


def takes(model: torch.nn.Module) -> bool:
    """Whether the kernels run this model's attention: float32 on a CPU that something compiles for."""
    return fits(next(model.parameters())) and library() is not None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Attention and the log of its denominators [heads, N]."""
    size = q.shape[2]
    q, k, v = _widened(q, k, v)
    out, logs = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    places = _Places.of(table)
    kernels().gspo_attend(
        *(x.data_ptr() for x in (q, k, v, out, logs)), places.sequences, places.chunks, places.num_chunks,
        len(q), _shape(q, k, scale, window),
    )  # fmt: skip
    return _narrowed(out, size), logs


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logs: Tensor,
    table: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    size = q.shape[2]
    q, k, v = _widened(q, k, v)
    grad, out = _wide(grad), _wide(out)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    places = _Places.of(table)
    partials = q.new_empty(2, places.num_sums, *k.shape[1:])
    kernels().gspo_attend_backward(
        *(x.data_ptr() for x in (grad, q, k, v, out, logs, *grads, partials)), places.num_sums,
        places.sequences, places.chunks, places.num_chunks, len(q), _shape(q, k, scale, window),
    )  # fmt: skip
    of_q, of_k, of_v = (_narrowed(x, size) for x in grads)
    return of_q, of_k, of_v


def decode_attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, rows: Tensor,
    chunks: Tensor, scale: float, window: int,
) -> Tensor:  # fmt: skip
    """Attention of one new token a row, whose key and value are stored at place `lengths` [B] of its row.

    `keys` and `values` are [slots, key heads, places, `wide_size(size)`]. `rows` lists all rows, chunk by chunk; those of
    a chunk [first, how many, tokens] begin with the same tokens, which are read from the first of them.
    """
    size = q.shape[2]
    q, k, v = _widened(q, k, v)
    out = torch.empty_like(q)
    kernels().gspo_decode_attend(
        *(x.data_ptr() for x in (q, k, v, keys, values, out, lengths, rows, chunks)), len(chunks),
        keys.shape[2], _shape(q, k, scale, window),
    )  # fmt: skip
    return _narrowed(out, size)


def wide_size(size: int) -> int:
    """Numbers of a head as the kernels take them: whole vectors, zeros at the end."""
    return size + -size % LANES


def _widened(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if k.shape != v.shape:
        raise ValueError(f"values of {v.shape[-1]} numbers a head where keys have {k.shape[-1]}")
    if not all(map(fits, (q, k, v))):
        raise ValueError(f"attention in {q.dtype}, {k.dtype}, {v.dtype}, which the kernels do not take")
    return _wide(q), _wide(k), _wide(v)


def _wide(x: Tensor) -> Tensor:
    return F.pad(x, (0, wide_size(x.shape[2]) - x.shape[2])) if x.shape[2] % LANES else x.contiguous()


def _narrowed(x: Tensor, size: int) -> Tensor:
    return x if x.shape[2] == size else x[:, :, :size].contiguous()


def _shape(q: Tensor, k: Tensor, scale: float, window: int) -> Any:
    return ctypes.byref(Shape(q.shape[1], k.shape[1], q.shape[2], window, scale))


def _like_attend(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0])


def _like_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale, ctx.window = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx: Any, grad: Tensor, _grad_logs: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, table, out, logs = ctx.saved_tensors
    grads = torch.ops.gspo.attend_backward(grad, q, k, v, out, logs, table, ctx.scale, ctx.window)
    return *grads, None, None, None


_LIBRARY = Library("gspo", "FRAGMENT")
_LIBRARY.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor table, float scale, int window) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logs, Tensor table, "
    "float scale, int window) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("attend", _attend, "CPU")
_LIBRARY.impl("attend", _like_attend, "Meta")
_LIBRARY.impl("attend_backward", _attend_backward, "CPU")
_LIBRARY.impl("attend_backward", _like_backward, "Meta")
torch.library.register_autograd("gspo::attend", _backward, setup_context=_save)
