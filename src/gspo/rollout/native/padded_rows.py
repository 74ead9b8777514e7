"""Rows with a cache of full length each: how a CPU decodes, and a GPU when the model does not run on pages."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import groupby

import torch

from gspo.rollout.counter_noise import uniform
from gspo.rollout.engine import SamplingParams
from gspo.rollout.native.decoder import Decoder, generating
from gspo.rollout.native.padded_cache import LayerKV, SlotCache
from gspo.rollout.native.runner import Runner
from gspo.rollout.native.slots import Slots, SlotStart
from gspo.rollout.token_sampling import RowSampling, choose


@dataclass(frozen=True, slots=True)
class _Prefix:
    """A prefilled context: one row of the keys and values of a prefill, which are [] for a context without tokens."""

    layers: list[LayerKV]
    row: int


class PaddedRows(Runner):
    """A Runner over padded caches [slots, heads, max_length, size], allocated at first use."""

    packs_prefill = False

    def __init__(self, decoder: Decoder, num_slots: int, max_length: int) -> None:
        self._decoder = decoder
        self._cache = SlotCache(num_slots, max_length, decoder.uses_kernel)
        self.slots = Slots(num_slots, max_length, decoder.device)
        # Reading a flag synchronises with a GPU; on a CPU it costs nothing.
        self.checks_every_step = decoder.device.type == "cpu"
        self._num_rows = 0
        self._longest = 0
        self._params: list[SamplingParams] = []
        self._sampling: RowSampling | None = None

    def running(self) -> AbstractContextManager[None]:
        return generating(self._decoder.model)

    def decoding(self) -> AbstractContextManager[None]:
        return self._decoder.decoding()

    def prefill(self, contexts: Sequence[Sequence[int]]) -> list[_Prefix]:
        layers = self._decoder.prefill(contexts) if any(contexts) else []
        return [_Prefix(layers, row) for row in range(len(contexts))]

    def place(self, prefixes: Sequence[_Prefix], starts: Sequence[SlotStart], params: Sequence[SamplingParams]) -> None:
        first = self._num_rows
        for _, same in groupby(zip(prefixes, starts), key=lambda pair: id(pair[0].layers)):
            rows = list(same)
            sources = torch.tensor([prefix.row for prefix, _ in rows], device=self.slots.device)
            self._cache.store(self._num_rows, sources, rows[0][0].layers, [start.length for _, start in rows])
            self._num_rows += len(rows)
        self.slots.place(first, starts)
        self._params += params
        self._longest = max(self._longest, *(s.length for s in starts))
        self._sampling = None

    def keep(self, prefix: _Prefix) -> _Prefix:
        row = slice(prefix.row, prefix.row + 1)
        if not prefix.layers or len(prefix.layers[0][0]) == 1:
            return prefix
        return _Prefix([(k[row].clone(), v[row].clone()) for k, v in prefix.layers], 0)

    def decode(self) -> None:
        # Rows that ended since the host last checked do not advance, so this width may exceed the longest row.
        slots, num_rows = self.slots, self._num_rows
        width = min(self._longest + 1, self._cache.max_length)
        length, key, first = slots.length[:num_rows], slots.key[:num_rows], slots.first[:num_rows]
        self._cache.begin_step(length, width)
        logits = self._decoder.decode(slots.token[:num_rows], length, self._cache, width)
        if self._sampling is None:
            self._sampling = RowSampling.of(self._params, slots.device)
        draws = None if self._sampling.all_greedy else uniform(key, length - first)
        if self._sampling.any_top:
            slots.record_top(logits, self._sampling.temperature)
        slots.record(*choose(logits, self._sampling, draws))
        self._longest += 1

    def remove(self, removed: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        if moves:
            gaps, movers = zip(*moves)
            for gap, mover in moves:
                self._params[gap] = self._params[mover]
            targets, sources = (torch.tensor(rows, device=self.slots.device) for rows in (gaps, movers))
            self.slots.move(targets, sources)
            self._cache.move(targets, sources, self._longest)
        self._num_rows -= len(removed)
        del self._params[self._num_rows :]
        self._longest = int(self.slots.length[: self._num_rows].max()) if self._num_rows else 0
        self._sampling = None

    def clear(self) -> None:
        self._num_rows = self._longest = 0
        self._params = []
        self._sampling = None
