"""A decoder's forward and backward captured as CUDA graphs, one pair for each size of packed micro-batch.

A small model on a fast GPU waits for the host to launch its kernels; a captured pair is one launch. Tokens, sequences
and keys are padded to a captured size. Attention leaves padding at zero (kernels/flash_packed.py); nothing reads it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from gspo.kernels.flash_packed import Spans

log = logging.getLogger(__name__)

MAX_GRAPHS = 12  # each holds its activations; further sizes run without a graph
TOKEN_STEP = 64  # graphs are captured for multiples of this many tokens
MAX_PADDING = 1.125  # most tokens of a graph per token of a micro-batch that runs in it
MAX_SIZES = 1 << 14  # number of micro-batch sizes whose graph is remembered

# Tokens, entries of `query_starts`, keys, and the most queries and keys of one sequence.
Size = tuple[int, int, int, int, int]


class GraphedDecoder:
    """Hidden states [N, H] of packed tokens from captured graphs; sizes without a graph run the decoder directly."""

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder
        self._graphs: dict[Size, Any] = {}
        self._chosen: dict[Size, Size | None] = {}  # a size keeps its graph: another may round differently
        self._memory: Any = None
        self.reason: str | None = None

    def hidden(self, input_ids: Tensor, position_ids: Tensor, spans: Spans) -> Tensor:
        """Hidden states of the decoder, with gradients to its parameters."""
        size = _size(input_ids.shape[1], spans)
        if size in self._chosen:
            captured = self._chosen.pop(size)
        else:
            captured = self._smallest_for(size) or self._capture(size, input_ids, position_ids, spans)
        self._chosen[size] = captured  # moved to the end, as the latest
        if len(self._chosen) > MAX_SIZES:
            del self._chosen[next(iter(self._chosen))]
        if captured is None:
            return _Packed(self._decoder)(input_ids, position_ids, *spans)[0]
        padded = _pad(captured, input_ids, position_ids, spans)
        return self._graphs[captured](*padded)[0, : input_ids.shape[1]]

    def _smallest_for(self, size: Size) -> Size | None:
        """The smallest graph that holds this size without much padding."""
        large_enough = [
            captured
            for captured in self._graphs
            if all(have >= need for have, need in zip(captured, size)) and captured[0] <= MAX_PADDING * size[0]
        ]
        return min(large_enough, default=None)

    def _capture(self, size: Size, input_ids: Tensor, position_ids: Tensor, spans: Spans) -> Size | None:
        """Capture a graph for this size. Returns its size, or None if there is no graph."""
        if self.reason is not None or len(self._graphs) >= MAX_GRAPHS:
            return None
        like = any(captured[0] < size[0] <= MAX_PADDING * captured[0] for captured in self._graphs)
        key = _rounded(size, varies=like)
        module = _Packed(self._decoder, key[-2:]).eval()
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        try:
            sample = tuple(x.clone() for x in _pad(key, input_ids, position_ids, spans))
            self._graphs[key] = torch.cuda.make_graphed_callables(
                module, sample, allow_unused_input=True, pool=self._memory
            )
        except Exception as error:  # models fail to capture in many ways
            self.reason = f"{type(error).__name__}: {error}"
            log.warning("training runs without CUDA graphs: %s", self.reason)
            return None
        return key


class _Packed(nn.Module):
    """A decoder as a function of tensors. `longest` are the most queries and keys of a sequence in the graph."""

    def __init__(self, decoder: nn.Module, longest: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.decoder = decoder
        self._longest = None if longest is None else torch.tensor(longest)

    def forward(self, input_ids: Tensor, position_ids: Tensor, *spans: Tensor) -> Tensor:
        """Hidden states. `spans` are the fields of Spans, in a graph without `longest`."""
        fields = spans if self._longest is None else (*spans, self._longest)
        out = self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, spans=Spans(*fields))
        return out.last_hidden_state


def _size(num_tokens: int, spans: Spans) -> Size:
    most_queries, most_keys = spans.longest.tolist()
    return num_tokens, len(spans.query_starts), len(spans.keys), most_queries, most_keys


def _rounded(size: Size, *, varies: bool) -> Size:
    """The size of a graph for this size: few extra tokens, which cost most, unless sizes vary."""
    num_tokens, num_starts, num_keys, most_queries, most_keys = size
    step = max(TOKEN_STEP, _power_of_two(num_tokens) // 16) if varies else TOKEN_STEP
    return (
        -(-num_tokens // step) * step,
        _power_of_two(num_starts),
        -(-num_keys * 9 // 8 // TOKEN_STEP) * TOKEN_STEP,
        _power_of_two(most_queries),
        _power_of_two(most_keys),
    )


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(0, (number - 1).bit_length())


def _pad(size: Size, input_ids: Tensor, position_ids: Tensor, spans: Spans) -> tuple[Tensor, ...]:
    num_tokens, num_starts, num_keys = size[:3]

    def fill(x: Tensor, size: int, *, last: bool = False) -> Tensor:
        extra = size - x.shape[-1]
        tail = x[..., -1:].expand(*x.shape[:-1], extra) if last else x.new_zeros(*x.shape[:-1], extra)
        return torch.cat([x, tail], dim=-1)

    return (
        fill(input_ids, num_tokens),
        fill(position_ids, num_tokens),
        fill(spans.query_starts, num_starts, last=True),
        fill(spans.key_starts, num_starts, last=True),
        fill(spans.keys, num_keys),
    )
