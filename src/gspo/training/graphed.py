"""A decoder's forward and backward captured as CUDA graphs, one pair for each size of packed micro-batch.

A small model on a fast GPU waits for the host to launch its kernels; a captured pair is launched as a whole. Tokens,
sequences and keys are padded to a bucket: attention leaves padding at zero (flash.py), and nothing reads it.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import Tensor, nn

from gspo.training.flash import Spans

log = logging.getLogger(__name__)

MAX_GRAPHS = 12  # each holds its activations: more kinds of micro-batch than this run without


class GraphedDecoder:
    """Hidden states [N, H] of packed tokens by captured graphs; what cannot be captured runs as it is."""

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder
        self._graphs: dict[tuple[int, ...], Any] = {}
        self._memory: Any = None
        self.reason: str | None = None

    def hidden(self, input_ids: Tensor, position_ids: Tensor, spans: Spans) -> Tensor:
        """As the decoder's own, with gradients to its parameters."""
        key = _bucket(input_ids.shape[1], spans)
        if key not in self._graphs and self.reason is None and len(self._graphs) < MAX_GRAPHS:
            self._capture(key, input_ids, position_ids, spans)
        if key not in self._graphs:
            return _Packed(self._decoder)(input_ids, position_ids, *spans)[0]
        padded = _pad(key, input_ids, position_ids, spans)
        return self._graphs[key](*padded)[0, : input_ids.shape[1]]

    def _capture(self, key: tuple[int, ...], input_ids: Tensor, position_ids: Tensor, spans: Spans) -> None:
        module = _Packed(self._decoder, key[-2:]).eval()
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        try:
            sample = tuple(x.clone() for x in _pad(key, input_ids, position_ids, spans))
            self._graphs[key] = torch.cuda.make_graphed_callables(
                module, sample, allow_unused_input=True, pool=self._memory
            )
        except Exception as error:  # whatever a model does that cannot be captured
            self.reason = f"{type(error).__name__}: {error}"
            log.warning("training runs without CUDA graphs: %s", self.reason)


class _Packed(nn.Module):
    """A decoder as a function of tensors alone. `longest` are the most queries and keys a captured sequence may have."""

    def __init__(self, decoder: nn.Module, longest: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.decoder = decoder
        self._longest = None if longest is None else torch.tensor(longest)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        query_starts: Tensor,
        key_starts: Tensor,
        keys: Tensor,
        longest: Tensor | None = None,
    ) -> Tensor:
        limits = longest if self._longest is None else self._longest
        assert limits is not None
        spans = Spans(query_starts, key_starts, keys, limits)
        out = self.decoder(input_ids=input_ids, position_ids=position_ids, use_cache=False, spans=spans)
        return out.last_hidden_state


def _bucket(num_tokens: int, spans: Spans) -> tuple[int, ...]:
    """Tokens, sequences, keys, most queries and most keys of the graph that takes these."""
    most_queries, most_keys = spans.longest.tolist()
    return (
        _round_up(num_tokens, 8),
        _round_up(len(spans.query_starts), 1),
        _round_up(len(spans.keys), 8),
        _round_up(most_queries, 1),
        _round_up(most_keys, 1),
    )


def _round_up(number: int, steps: int) -> int:
    """The next of `steps` even sizes between powers of two."""
    power = 1 << max(0, (number - 1).bit_length())
    step = max(1, power // 2 // steps)
    return -(-number // step) * step


def _pad(key: tuple[int, ...], input_ids: Tensor, position_ids: Tensor, spans: Spans) -> tuple[Tensor, ...]:
    num_tokens, num_starts, num_keys = key[:3]

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
