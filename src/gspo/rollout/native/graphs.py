"""Decode steps and prefills captured as CUDA graphs, one for each size of batch.

A launch costs the host about 10 µs, and a forward has hundreds: for small models the host would be the limit. A
captured forward is launched as one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from gspo.rollout.engine import SamplingParams
from gspo.rollout.native.pages import LengthsNeeded, PackedContexts, packed_tokens
from gspo.rollout.native.slots import Slots, upload

if TYPE_CHECKING:
    from gspo.rollout.native.paged_model import PagedModel

log = logging.getLogger(__name__)

WARM_UPS = 2
PADDING = 128  # tokens of one context that fills up a captured prefill
MAX_KINDS = 8  # of sampling, whose decode steps are captured; those used longest ago are dropped
Step = Callable[[int, SamplingParams], None]  # draws one token for this many rows


class Graphs:
    """Graphs that are captured at first use and share their memory."""

    def __init__(self, paged: PagedModel) -> None:
        self._paged = paged
        self._graphs: dict[Any, torch.cuda.CUDAGraph | None] = {}
        self._memory: Any = None  # shared by all graphs

    def _capture(self, what: str, run: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        """A graph of `run`, which must be harmless to run now; None when it cannot be captured."""
        self._paged.compiled_or_not(lambda: _warm_up(run))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._memory):
                run()
        except RuntimeError as error:
            log.warning("the %s is not captured as a CUDA graph: %s", what, error)
            return None
        self._memory = graph.pool()
        return graph


def _warm_up(run: Callable[[], None]) -> None:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run()
    torch.cuda.current_stream().wait_stream(stream)


class DecodeGraphs(Graphs):
    """Replays `step` for a number of rows and kind of sampling; runs it plainly where it cannot be captured."""

    def __init__(
        self, step: Step, paged: PagedModel, slots: Slots, forget: Callable[[SamplingParams], Any] = lambda params: None
    ) -> None:
        super().__init__(paged)
        self._step, self._slots, self._forget = step, slots, forget
        self._stops_address = slots.stops.data_ptr()
        self._kinds: dict[SamplingParams, None] = {}  # in order of last use

    def run(self, num_rows: int, params: SamplingParams) -> None:
        """Draw one token for each of the first `num_rows` rows."""
        self._note_kind(params)
        graph = self._graph(num_rows, params) if self._paged.graphs else None
        if graph is None:
            self._step(num_rows, params)
        else:
            graph.replay()

    def _note_kind(self, params: SamplingParams) -> None:
        """Put this kind of sampling last in `_kinds`, and drop what was captured for the first when there are too many."""
        self._kinds[params] = self._kinds.pop(params, None)
        if len(self._kinds) > MAX_KINDS:
            oldest = next(iter(self._kinds))
            del self._kinds[oldest]
            self._graphs = {key: graph for key, graph in self._graphs.items() if key[1] != oldest}
            self._forget(oldest)

    def follow_stops(self) -> None:
        """Drop every graph when the table of stop tokens was widened and so has a new address."""
        if self._slots.stops.data_ptr() != self._stops_address:
            self._stops_address = self._slots.stops.data_ptr()
            self._graphs = {}

    def _graph(self, num_rows: int, params: SamplingParams) -> torch.cuda.CUDAGraph | None:
        key = (num_rows, params)
        if key not in self._graphs:
            done = self._slots.done
            before = done.clone()
            done.fill_(True)  # rows that are done do not advance, so warming up changes nothing
            try:
                self._graphs[key] = self._capture("decode step", lambda: self._step(num_rows, params))
            finally:
                done.copy_(before)
            if self._graphs[key] is None:
                self._paged.graphs = False
        return self._graphs[key]


class PrefillGraphs(Graphs):
    """Replays prefills of up to `max_tokens` tokens. Contexts are packed into one of a few sizes and padded with others."""

    def __init__(self, paged: PagedModel, max_tokens: int, max_length: int) -> None:
        super().__init__(paged)
        self._sizes = prefill_sizes(max_tokens)
        self._longest = max(max_length, PADDING)
        self._enabled = paged.graphs
        self._inputs: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by size: tokens, positions, places; starts

    def run(self, contexts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]]) -> bool:
        """Fill `pages` with the keys and values of `contexts`; False when no graph holds them."""
        num_tokens = sum(map(len, contexts))
        size = next((s for s in self._sizes if s >= num_tokens and _num_contexts(s) >= len(contexts)), None)
        if not self._enabled or not self._paged.graphs or size is None:
            return False
        if size not in self._graphs:
            self._graphs[size] = self._capture_size(size)
        graph = self._graphs[size]
        if graph is None:
            self._enabled = False
            return False
        self._fill(size, contexts, pages)
        graph.replay()
        return True

    def _capture_size(self, size: int) -> torch.cuda.CUDAGraph | None:
        device = self._paged.device
        ints = torch.zeros(3, size, dtype=torch.int64, device=device)
        self._inputs[size] = ints, torch.zeros(_num_starts(size), dtype=torch.int32, device=device)
        self._fill(size, [], [])
        packed = PackedContexts(self._inputs[size][1], ints[2], self._longest, None)
        try:
            return self._capture("prefill", lambda: self._paged.run_prefill(ints[0], ints[1], packed))
        except LengthsNeeded:
            return None

    def _fill(self, size: int, contexts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]]) -> None:
        """Write the contexts to the graph's inputs; the rest becomes contexts of up to PADDING tokens on page 0."""
        num_tokens = sum(map(len, contexts))
        rest = size - num_tokens
        ints = np.zeros((3, size), dtype=np.int64)
        if contexts:
            ints[:, :num_tokens] = packed_tokens(contexts, pages)
        ints[1, num_tokens:] = np.arange(rest) % PADDING
        lengths = [*map(len, contexts), *[PADDING] * (rest // PADDING), *([rest % PADDING] if rest % PADDING else [])]
        starts = np.full(_num_starts(size), size, dtype=np.int32)
        starts[: len(lengths) + 1] = [0, *accumulate(lengths)]
        for target, values in zip(self._inputs[size], (ints, starts)):
            target.copy_(upload(values, target.device, values.dtype))


def _num_contexts(size: int) -> int:
    """Contexts that a captured prefill of `size` tokens may have: empty ones cost little, but not nothing."""
    return max(8, size // 32)


def _num_starts(size: int) -> int:
    return _num_contexts(size) + size // PADDING + 3


def prefill_sizes(max_tokens: int) -> list[int]:
    """Sizes that are captured: 128, 256, 384, 512, 768, 1024 … up to one that holds `max_tokens`."""
    return _sizes([128, 256], max_tokens, halves_from=256)


def batch_sizes(num_slots: int) -> list[int]:
    """Batch sizes that are captured: 2, 4, 8, 16, 24, 32, 48 … up to one that holds `num_slots` rows."""
    return _sizes([2, 4, 8], num_slots, halves_from=16)


def _sizes(first: list[int], most: int, halves_from: int) -> list[int]:
    """Powers of two, from `halves_from` on also the sizes halfway between, up to one that holds `most`."""
    sizes = list(first)
    while sizes[-1] < most:
        last = sizes[-1]
        is_power = last & (last - 1) == 0
        sizes.append(last * 3 // 2 if is_power and last >= halves_from else 1 << last.bit_length())
    return [s for s in sizes if s < most] + [next(s for s in sizes if s >= most)]
