"""Causal attention over packed sequences with shared prefixes, as one operation that torch can compile around."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain, groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from gspo.kernels.cpu_library import Shape, is_cpu_float32, kernels, library

# Sequences of a prefix that one thread processes together. More than a few would leave threads idle.
CHUNK = 8
LANES = 16  # numbers in a vector


class PackedSequences(NamedTuple):
    """The sequences of a packed row, grouped by the prefix they continue, as one int64 table.

        [ S, C,                                          number of sequences and of chunks
          start, length, prefix start, prefix length,    S times, sequences of a prefix side by side
          first sequence, count, sum start,              C times
        ]

    A chunk is up to CHUNK sequences of one prefix, which one thread processes together; `sum start` is where their
    gradients of the prefix are summed. One tensor, because a compiled layer guards the size of each of its inputs.
    """

    table: Tensor

    @staticmethod
    def of(sequences: Sequence[tuple[int, int, int, int]], device: torch.device | str = "cpu") -> PackedSequences:
        """From sequences as (start, length, prefix start, prefix length); `device` is the CPU."""
        ordered = sorted((s for s in sequences if s[1]), key=lambda s: s[2:])
        chunks, first, sum_start = [], 0, 0
        for (_, size), same_prefix in groupby(ordered, key=lambda s: s[2:]):
            left = len(list(same_prefix))
            while left:
                count = min(left, CHUNK if size else 1)
                chunks.append((first, count, sum_start))
                first, left, sum_start = first + count, left - count, sum_start + size
        return PackedSequences(torch.tensor([len(ordered), len(chunks), *chain(*ordered, *chunks)], device=device))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """Causal attention [N, heads, size] of every sequence to its keys; `window` counts the token itself."""
        return torch.ops.gspo.attend(q, k, v, self.table, scale, window or 0)[0]


class _Pointers(NamedTuple):
    """Where the lists of a table are in memory, for the C++ kernels."""

    sequences: int
    chunks: int
    num_chunks: int
    num_sums: int  # tokens of prefixes, counted once per chunk

    @staticmethod
    def of(table: Tensor) -> _Pointers:
        num, num_chunks = table[:2].tolist()
        sequences, chunks = table[2 : 2 + 4 * num], table[2 + 4 * num :]
        num_sums = 0
        if num_chunks:
            first, _, sum_start = chunks[-3:].tolist()
            num_sums = sum_start + int(sequences[4 * first + 3])
        return _Pointers(sequences.data_ptr(), chunks.data_ptr(), num_chunks, num_sums)


def supports(model: torch.nn.Module) -> bool:
    """Whether the kernels run this model's attention: float32 on a CPU, and the kernels were compiled."""
    return is_cpu_float32(next(model.parameters())) and library() is not None


def _attend(q: Tensor, k: Tensor, v: Tensor, table: Tensor, scale: float, window: int) -> tuple[Tensor, Tensor]:
    """Attention, and the log of its denominators [heads, N]."""
    size = q.shape[2]
    q, k, v = _check_and_pad(q, k, v)
    out, logs = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    at = _Pointers.of(table)
    kernels().gspo_attend(
        *(x.data_ptr() for x in (q, k, v, out, logs)), at.sequences, at.chunks, at.num_chunks,
        len(q), _shape(q, k, scale, window),
    )  # fmt: skip
    return _unpad(out, size), logs


def _attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logs: Tensor, table: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor, Tensor]:
    size = q.shape[2]
    q, k, v = _check_and_pad(q, k, v)
    grad, out = _pad(grad), _pad(out)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    at = _Pointers.of(table)
    partials = q.new_empty(2, at.num_sums, *k.shape[1:])
    kernels().gspo_attend_backward(
        *(x.data_ptr() for x in (grad, q, k, v, out, logs, *grads, partials)), at.num_sums,
        at.sequences, at.chunks, at.num_chunks, len(q), _shape(q, k, scale, window),
    )  # fmt: skip
    grad_q, grad_k, grad_v = (_unpad(x, size) for x in grads)
    return grad_q, grad_k, grad_v


def decode_attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, rows: Tensor,
    chunks: Tensor, scale: float, window: int,
) -> Tensor:  # fmt: skip
    """Attention of one new token per row, whose key and value are stored at position `lengths` [B] of its row.

    `keys` and `values` are [slots, key heads, positions, padded_size(size)]. `rows` lists all rows, chunk by chunk; the
    rows of a chunk [first, count, tokens] begin with the same tokens, which are read from its first row.
    """
    size = q.shape[2]
    q, k, v = _check_and_pad(q, k, v)
    out = torch.empty_like(q)
    kernels().gspo_decode_attend(
        *(x.data_ptr() for x in (q, k, v, keys, values, out, lengths, rows, chunks)), len(chunks),
        keys.shape[2], _shape(q, k, scale, window),
    )  # fmt: skip
    return _unpad(out, size)


def padded_size(size: int) -> int:
    """The head size of the kernels: whole vectors, with zeros at the end."""
    return size + -size % LANES


def _check_and_pad(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if k.shape != v.shape:
        raise ValueError(f"values have a head size of {v.shape[-1]}, keys of {k.shape[-1]}")
    if not all(map(is_cpu_float32, (q, k, v))):
        raise ValueError(f"attention in {q.dtype}, {k.dtype}, {v.dtype}; the kernels run float32 on a CPU")
    return _pad(q), _pad(k), _pad(v)


def _pad(x: Tensor) -> Tensor:
    return F.pad(x, (0, padded_size(x.shape[2]) - x.shape[2])) if x.shape[2] % LANES else x.contiguous()


def _unpad(x: Tensor, size: int) -> Tensor:
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
_LIBRARY.define("attend(Tensor q, Tensor k, Tensor v, Tensor table, float scale, int window) -> (Tensor, Tensor)")
_LIBRARY.define(
    "attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logs, Tensor table, "
    "float scale, int window) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("attend", _attend, "CPU")
_LIBRARY.impl("attend", _like_attend, "Meta")
_LIBRARY.impl("attend_backward", _attend_backward, "CPU")
_LIBRARY.impl("attend_backward", _like_backward, "Meta")
torch.library.register_autograd("gspo::attend", _backward, setup_context=_save)
