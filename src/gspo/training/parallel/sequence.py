"""Ulysses sequence parallelism: several ranks run the same packed row, each a part of its tokens.

    layers     tokens 0 … n      n … 2n        every rank has its part of the tokens, with all heads
    attention  heads  0 … h      h … 2h        all-to-all: every rank has all tokens, with its part of the heads
    layers     tokens 0 … n      n … 2n        all-to-all back
    head       log-probs of each part, then added up: every rank has those of all tokens and computes the same loss

The gradient of a log-prob is used on the rank that computed it alone, and gradients of weights are summed over ranks,
so each token counts once (arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from gspo.training.parallel import ShardError


@dataclass(frozen=True, slots=True)
class SequenceRanks:
    """The `size` neighbouring ranks that run the same rows, and this one's place among them."""

    rank: int
    size: int
    group: Any

    @staticmethod
    def of(size: int) -> SequenceRanks:
        """The ranks that share this rank's sequences. Every rank of the launch calls it."""
        world = dist.get_world_size()
        if world % size:
            raise ShardError(
                f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={size} does not divide the {world} trainer "
                f"rank{'s' * (world > 1)}; use a divisor"
            )
        group, _ = dist.new_subgroups(size)
        return SequenceRanks(dist.get_rank() % size, size, group)

    def part_sizes(self, num_tokens: int) -> list[int]:
        """The number of tokens of each rank."""
        return [num_tokens // self.size + (rank < num_tokens % self.size) for rank in range(self.size)]

    def bounds(self, num_tokens: int) -> tuple[int, int]:
        """Where this rank's tokens of a packed row begin and end."""
        sizes = self.part_sizes(num_tokens)
        start = sum(sizes[: self.rank])
        return start, start + sizes[self.rank]

    def part(self, num_tokens: int) -> slice:
        """The tokens that this rank runs through the layers: its own, or if it has none a first one that nobody reads."""
        start, end = self.bounds(num_tokens)
        return slice(start, end) if end > start else slice(0, 1)

    def to_heads(self, num_tokens: int, *parts: Tensor) -> list[Tensor]:
        """Each [own tokens, heads, size] as [all tokens, own heads, size], in one exchange."""
        start, end = self.bounds(num_tokens)
        parts = tuple(self._with_enough_heads(x[: end - start]) for x in parts)
        flat = torch.cat([x.unflatten(1, (self.size, -1)).flatten(2) for x in parts], dim=2)
        out = _Exchanged.apply(flat, self, self.part_sizes(num_tokens), _gather_tokens, _gather_heads)
        widths = [x.shape[1] // self.size * x.shape[2] for x in parts]
        return [x.unflatten(1, (-1, size)) for x, size in zip(out.split(widths, dim=1), (x.shape[2] for x in parts))]

    def to_tokens(self, x: Tensor) -> Tensor:
        """[all tokens, own heads, size] as [own tokens, heads, size]."""
        out = _Exchanged.apply(x.flatten(1), self, self.part_sizes(len(x)), _gather_heads, _gather_tokens)
        out = out.unflatten(2, x.shape[1:]).flatten(1, 2)
        return out if len(out) else pad(out, (0, 0, 0, 0, 0, 1))

    def _with_enough_heads(self, x: Tensor) -> Tensor:
        """Fewer key heads than ranks are repeated: each query head's rank gets the key head it reads."""
        return x if x.shape[1] % self.size == 0 else x.repeat_interleave(self.size // x.shape[1], dim=1)

    def add_up(self, values: Tensor) -> Tensor:
        """The sum over these ranks, with the same bits on each. Each rank's own part keeps its gradient."""
        return _AddUp.apply(values, self.group)

    def check(self, model: Any) -> None:
        """Refuse a model whose attention heads cannot be divided among these ranks."""
        config = model.config.get_text_config()
        heads = config.num_attention_heads
        key_heads = getattr(config, "num_key_value_heads", None) or heads
        divides = heads % self.size == 0 and (key_heads % self.size == 0 or self.size % key_heads == 0)
        if not divides:
            raise ShardError(
                f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={self.size}: {type(model).__name__} has {heads} "
                f"attention heads and {key_heads} key heads, which {self.size} ranks cannot share evenly; use a divisor "
                f"of {heads}"
            )


def _exchange(x: Tensor, ranks: SequenceRanks, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    """Send `sent[i]` rows of x to rank i, one after another. Returns the rows from all ranks in their order."""
    out = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), list(received), list(sent), group=ranks.group)
    return out


def _gather_tokens(x: Tensor, ranks: SequenceRanks, sizes: Sequence[int]) -> Tensor:
    """[own tokens, ranks, width] → [all tokens, width]."""
    return _exchange(x.transpose(0, 1).flatten(0, 1), ranks, [len(x)] * ranks.size, sizes)


def _gather_heads(x: Tensor, ranks: SequenceRanks, sizes: Sequence[int]) -> Tensor:
    """[all tokens, width] → [own tokens, ranks, width]."""
    own = sizes[ranks.rank]
    return _exchange(x, ranks, sizes, [own] * ranks.size).view(ranks.size, own, x.shape[1]).transpose(0, 1)


class _Exchanged(torch.autograd.Function):
    """`there(x, ranks, sizes)`, whose gradient goes `back` the same way."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        ranks: SequenceRanks,
        sizes: list[int],
        there: Callable[..., Tensor],
        back: Callable[..., Tensor],
    ) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.ranks, ctx.sizes, ctx.back = ranks, sizes, back
        return there(x, ranks, sizes)

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.back(grad, ctx.ranks, ctx.sizes), None, None, None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, values: Tensor, group: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = values.clone()
        dist.all_reduce(out, group=group)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad, None
