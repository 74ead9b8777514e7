"""Causal attention over packed sequences with shared prefixes, as one operation that a compiler can take."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library

from gspo.cpu.library import Shape, fits, library

# Sequences of a prefix that one thread takes together. More than a few would leave threads idle.
CHUNK = 8
LANES = 16  # numbers of a vector


class Families(NamedTuple):
    """The sequences of a packed row, those that continue the same prefix side by side."""

    sequences: Tensor  # [sequences, 4] start, length, start of the prefix, its length
    chunks: Tensor  # [chunks, 3] first sequence, how many, where their prefix's gradients are summed

    @staticmethod
    def of(sequences: Sequence[tuple[int, int, int, int]], device: torch.device | str = "cpu") -> Families:
        """Of sequences given as start, length, start of the prefix, its length."""
        ordered = sorted((s for s in sequences if s[1]), key=lambda s: s[2:])
        chunks, first, place = [], 0, 0
        for (_, size), members in groupby(ordered, key=lambda s: s[2:]):
            left = len(list(members))
            while left:
                count = min(left, CHUNK if size else 1)
                chunks.append((first, count, place))
                first, left, place = first + count, left - count, place + size
        return Families(torch.tensor(ordered), torch.tensor(chunks))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """Causal attention [N, heads, size] of every sequence to its keys; `window` counts the token itself."""
        return torch.ops.gspo.attend(q, k, v, self.sequences, self.chunks, scale, window or 0)[0]


def takes(model: torch.nn.Module) -> bool:
    """Whether the kernels run this model's attention: float32 on a CPU that something compiles for."""
    return fits(next(model.parameters())) and library() is not None


def _attend(
    q: Tensor, k: Tensor, v: Tensor, sequences: Tensor, chunks: Tensor, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """Attention and the log of its denominators [heads, N]."""
    size = q.shape[2]
    q, k, v = _widened(q, k, v)
    out, logs = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0])
    _kernels().gspo_attend(
        *(x.data_ptr() for x in (q, k, v, out, logs, sequences, chunks)), len(chunks), len(q),
        _shape(q, k, scale, window),
    )  # fmt: skip
    return _narrowed(out, size), logs


def _attend_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    logs: Tensor,
    sequences: Tensor,
    chunks: Tensor,
    scale: float,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    size = q.shape[2]
    q, k, v = _widened(q, k, v)
    grad, out = _wide(grad), _wide(out)
    grads = [torch.empty_like(x) for x in (q, k, v)]
    first, _, place = chunks[-1].tolist()
    num_places = place + int(sequences[first, 3])
    partials = q.new_empty(2, num_places, *k.shape[1:])
    _kernels().gspo_attend_backward(
        *(x.data_ptr() for x in (grad, q, k, v, out, logs, *grads, partials)), num_places,
        sequences.data_ptr(), chunks.data_ptr(), len(chunks), len(q), _shape(q, k, scale, window),
    )  # fmt: skip
    of_q, of_k, of_v = (_narrowed(x, size) for x in grads)
    return of_q, of_k, of_v


def decode_attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor, values: Tensor, lengths: Tensor, rows: Tensor,
    chunks: Tensor, scale: float, window: int,
) -> Tensor:  # fmt: skip
    """Attention of one new token a row, whose key and value are stored at place `lengths` [B] of its row.

    `keys` and `values` are [slots, key heads, places, `wide_size(size)`]. `rows` lists all rows, chunk by chunk; those of a chunk
    [first, how many, tokens] begin with the same tokens, which are read from the first of them.
    """
    size = q.shape[2]
    q, k, v = _widened(q, k, v)
    out = torch.empty_like(q)
    _kernels().gspo_decode_attend(
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
    return _wide(q), _wide(k), _wide(v)


def _wide(x: Tensor) -> Tensor:
    return F.pad(x, (0, wide_size(x.shape[2]) - x.shape[2])) if x.shape[2] % LANES else x.contiguous()


def _narrowed(x: Tensor, size: int) -> Tensor:
    return x if x.shape[2] == size else x[:, :, :size].contiguous()


def _kernels() -> ctypes.CDLL:
    kernels = library()
    assert kernels is not None, "asked for only where the library is there"
    return kernels


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
    q, k, v, sequences, chunks, out, logs = ctx.saved_tensors
    grads = torch.ops.gspo.attend_backward(
        grad, q, k, v, out, logs, sequences, chunks, ctx.scale, ctx.window
    )
    return *grads, None, None, None, None


_LIBRARY = Library("gspo", "FRAGMENT")
_LIBRARY.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor sequences, Tensor chunks, float scale, int window) -> (Tensor, Tensor)"
)
_LIBRARY.define(
    "attend_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor out, Tensor logs, Tensor sequences, "
    "Tensor chunks, float scale, int window) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("attend", _attend, "CPU")
_LIBRARY.impl("attend", _like_attend, "Meta")
_LIBRARY.impl("attend_backward", _attend_backward, "CPU")
_LIBRARY.impl("attend_backward", _like_backward, "Meta")
torch.library.register_autograd("gspo::attend", _backward, setup_context=_save)
