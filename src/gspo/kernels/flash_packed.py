"""Flash attention over packed sequences with shared prefixes, as one operation that torch can compile around."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gspo.kernels.device_memory import upload
from gspo.kernels.ragged import ranges

_NO_WINDOW = -1


class Spans(NamedTuple):
    """The sequences of a packed row in the kernel's form; a sequence's `keys` are those of its prefix, then its own."""

    query_starts: Tensor  # [sequences + 1] int32
    key_starts: Tensor  # [sequences + 1] int32
    keys: Tensor  # [keys]
    longest: Tensor  # [2], on the CPU: the most queries and the most keys of a sequence

    @staticmethod
    def of(sequences: Sequence[tuple[int, int, int, int]], device: torch.device | str) -> Spans:
        """From sequences as (start, length, prefix start, prefix length)."""
        lengths = torch.tensor([length for _, length, _, _ in sequences])
        totals = torch.tensor([length + size for _, length, _, size in sequences])
        parts = [part for start, length, before, size in sequences for part in ((before, size), (start, length))]
        keys = ranges([at for at, _ in parts], [num for _, num in parts])
        query_starts, key_starts = (
            upload(torch.nn.functional.pad(x.cumsum(0), (1, 0)).int(), device) for x in (lengths, totals)
        )
        longest = torch.stack([lengths.max(), totals.max()])
        return Spans(query_starts, key_starts, upload(keys, device), longest)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        """Causal attention [N, heads, size] to a sequence's keys, counted from their end; `window` counts the token too."""
        left = _NO_WINDOW if window is None else window - 1
        return packed_flash(q, k, v, *self, scale, left)[0]


def supports(model: torch.nn.Module) -> bool:
    """Whether the kernel runs this model: half precision on a GPU, with a head size that it has."""
    parameter = next(model.parameters())
    config = model.config.get_text_config()  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]
    heads = getattr(config, "num_attention_heads", 0) or 1
    size = getattr(config, "head_dim", None) or config.hidden_size // heads
    return parameter.is_cuda and parameter.dtype in (torch.bfloat16, torch.float16) and size % 8 == 0 and size <= 256


@torch.library.custom_op("gspo::packed_flash", mutates_args=())
def packed_flash(
    q: Tensor, k: Tensor, v: Tensor, query_starts: Tensor, key_starts: Tensor, keys: Tensor, longest: Tensor,
    scale: float, left: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention, and the log of its denominators [heads, N]."""
    most_queries, most_keys = longest.tolist()
    out, denominators = torch.ops.aten._flash_attention_forward(
        q.contiguous(), k.index_select(0, keys), v.index_select(0, keys), query_starts, key_starts,
        most_queries, most_keys, 0.0, True, False, scale=scale, **_window(left),
    )[:2]  # fmt: skip
    return _zero_padding(out, query_starts), denominators


@packed_flash.register_fake
def _(q, k, v, query_starts, key_starts, keys, longest, scale, left):
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(
        (q.shape[1], q.shape[0]), dtype=torch.float32
    )


@torch.library.custom_op("gspo::packed_flash_backward", mutates_args=())
def packed_flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, denominators: Tensor,
    query_starts: Tensor, key_starts: Tensor, keys: Tensor, longest: Tensor, scale: float, left: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v; those of a prefix are summed over its sequences in float32."""
    most_queries, most_keys = longest.tolist()
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    grad_q, *grads = torch.ops.aten._flash_attention_backward(
        grad.contiguous(), q.contiguous(), k.index_select(0, keys), v.index_select(0, keys), out, denominators,
        query_starts, key_starts, most_queries, most_keys, 0.0, True, no_dropout,
        torch.empty(0, device=q.device), scale=scale, **_window(left),
    )  # fmt: skip
    grad_k, grad_v = (
        torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        .index_add_(0, keys, _zero_padding(g, key_starts).float())
        .to(x.dtype)
        for x, g in zip((k, v), grads)
    )
    return _zero_padding(grad_q, query_starts), grad_k, grad_v


@packed_flash_backward.register_fake
def _(grad, q, k, v, out, denominators, query_starts, key_starts, keys, longest, scale, left):
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _zero_padding(x: Tensor, starts: Tensor) -> Tensor:
    """x [N, …] with zeros after the last sequence, where the kernel writes nothing."""
    inside = torch.arange(len(x), device=x.device) < starts[-1]
    return torch.where(inside[:, None, None], x, 0.0)


def _window(left: int) -> dict[str, int]:
    return {} if left == _NO_WINDOW else {"window_size_left": left, "window_size_right": 0}


def _save(ctx, inputs, output) -> None:
    *tensors, ctx.scale, ctx.left = inputs
    ctx.save_for_backward(*tensors, *output)


def _backward(ctx, grad: Tensor, _grad_denominators: Tensor):
    q, k, v, query_starts, key_starts, keys, longest, out, denominators = ctx.saved_tensors
    grads = packed_flash_backward(
        grad, q, k, v, out, denominators, query_starts, key_starts, keys, longest, ctx.scale, ctx.left
    )
    return *grads, None, None, None, None, None, None


packed_flash.register_autograd(_backward, setup_context=_save)
