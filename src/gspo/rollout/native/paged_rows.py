"""Rows on KV pages, whose decode step a GPU replays as a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo.kernels.sizes import PAGE
from gspo.rollout.counter_noise import uniform
from gspo.rollout.engine import SamplingParams
from gspo.rollout.native.paged_model import PagedModel
from gspo.rollout.native.pages import PageBook
from gspo.rollout.native.slots import Slots, SlotStart
from gspo.rollout.token_sampling import RowSampling, choose, cutoff

log = logging.getLogger(__name__)

WARM_UPS = 2


@dataclass(slots=True)
class _Context:
    """A prefilled token list: its pages (held once) and its length."""

    pages: list[int]
    length: int


@dataclass(slots=True)
class _Row:
    """A running row as the host sees it."""

    pages: list[int]
    length: int  # tokens in its pages
    last: int  # position whose output is the last token allowed
    params: SamplingParams


class PagedRows:
    """A Runner over a PagedModel. Decode steps are captured once for each batch bucket and kind of sampling."""

    looks_each_step = False
    packs = True

    def __init__(self, paged: PagedModel, num_slots: int, max_length: int) -> None:
        self._paged = paged
        self._buckets = buckets(num_slots)
        size = self._buckets[-1]
        self.slots = Slots(size, max_length, paged.device)
        width = max_length // PAGE + 2
        self._table = torch.zeros(size, width, dtype=torch.int32, device=paged.device)
        self._host_table = np.zeros((size, width), dtype=np.int32)
        self._rows: list[_Row] = []
        self._graphs: dict[tuple[int, SamplingParams], torch.cuda.CUDAGraph] = {}
        self._graph_memory: Any = None
        self._stops_at = self.slots.stops.data_ptr()
        self._ahead = 0  # tokens drawn since the rows' lengths were brought up to date
        self._alike = True  # all rows are drawn in one way
        self._changed = True  # rows or pages since the device last saw them

    def running(self) -> Any:
        self._paged.allocate()
        return self._paged.running()

    @contextmanager
    def decoding(self) -> Iterator[None]:
        yield

    @property
    def _book(self) -> PageBook:
        return self._paged.book

    def prefill(self, contexts: Sequence[Sequence[int]]) -> list[_Context]:
        kv = self._paged.allocate()
        prefix = [_Context(self._book.take(-(-len(c) // PAGE)), len(c)) for c in contexts]
        full = [i for i, c in enumerate(contexts) if len(c)]
        if full:
            self._paged.prefill(kv, [contexts[i] for i in full], [prefix[i].pages for i in full])
        return prefix

    def num_fitting(self, contexts: Sequence[Sequence[int]], sources: Sequence[int]) -> int:
        # Every row takes a page for its tail and should find one more when it grows.
        left = self._book.num_free - len(self._rows)
        known: set[int] = set()
        for num, source in enumerate(sources):
            if source < len(contexts) and source not in known:
                known.add(source)
                left -= -(-len(contexts[source]) // PAGE)
            left -= 2
            if left < 0:
                return num
        return len(sources)

    def place(
        self,
        prefix: list[_Context],
        sources: Sequence[int],
        starts: Sequence[SlotStart],
        params: Sequence[SamplingParams],
    ) -> None:
        self._catch_up()
        first = len(self._rows)
        copies: list[tuple[int, int]] = []  # half-filled pages: original, copy
        for source, start, drawn in zip(sources, starts, params):
            context = prefix[source]
            whole, rest = divmod(context.length, PAGE)
            shared = context.pages[:whole]
            self._book.hold(shared)
            tail = self._book.take(1) if rest else []
            copies += [(context.pages[whole], page) for page in tail]
            self._rows.append(_Row([*shared, *tail], start.length, start.last, drawn))
        self._copy(copies)
        self.slots.place(first, starts)
        self._changed = True

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            pairs = torch.tensor(copies, device=self._paged.device)
            for pools in self._paged.allocate().layers:
                for pool in pools:
                    pool[pairs[:, 1]] = pool[pairs[:, 0]]

    def keep(self, prefix: list[_Context], source: int) -> list[_Context]:
        self._book.hold(prefix[source].pages)
        return [prefix[source]]

    def drop(self, prefix: list[_Context]) -> None:
        for context in prefix:
            self._book.drop(context.pages)

    def reserve(self, num_steps: int) -> bool:
        """Pages for the next `num_steps` tokens of every row; False when there are too few, which changes nothing."""
        self._catch_up()
        needs = [-(-min(r.length + num_steps, r.last + 1) // PAGE) - len(r.pages) for r in self._rows]
        if sum(n for n in needs if n > 0) > self._book.num_free:
            return False
        for row, need in zip(self._rows, needs):
            if need > 0:
                row.pages += self._book.take(need)
                self._changed = True
        return True

    def remove(self, gone: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        self._catch_up()
        for row in gone:
            self._book.drop(self._rows[row].pages)
        for gap, mover in moves:
            self._rows[gap] = self._rows[mover]
        del self._rows[len(self._rows) - len(gone) :]
        if moves:
            gaps, movers = (torch.tensor(rows, device=self._paged.device) for rows in zip(*moves))
            self.slots.move(gaps, movers)
        self._changed = True

    def clear(self) -> None:
        for row in self._rows:
            self._book.drop(row.pages)
        self._rows = []
        self._ahead, self._changed = 0, True

    def _catch_up(self) -> None:
        for row in self._rows:
            row.length += self._ahead
        self._ahead = 0

    def forget_captures(self) -> None:
        """Captured steps hold the addresses of the pages; they go when the pages go."""
        self._graphs, self._graph_memory = {}, None

    def decode(self) -> None:
        num_rows = len(self._rows)
        bucket = next(size for size in self._buckets if size >= num_rows)
        if self._changed:
            self._settle(num_rows, bucket)
        if not self._alike:
            self._step_each(num_rows)
        elif self._paged.graphs:
            self._graph(bucket, self._rows[0].params).replay()
        else:
            self._step(bucket, self._rows[0].params)
        self._ahead += 1

    def _settle(self, num_rows: int, bucket: int) -> None:
        """Show the device the rows' pages, and park the rows of the bucket that are not in use."""
        table = self._host_table
        table[:bucket] = 0
        for number, row in enumerate(self._rows):
            table[number, : len(row.pages)] = row.pages
        self._table[:bucket].copy_(torch.from_numpy(table[:bucket]), non_blocking=False)
        self.slots.park(num_rows, bucket)
        if self.slots.stops.data_ptr() != self._stops_at:  # they were made wider, so moved
            self._stops_at = self.slots.stops.data_ptr()
            self._graphs = {}
        params = [row.params for row in self._rows]
        self._alike = len({id(p) for p in params}) == 1 or len(set(params)) == 1
        self._changed = False

    def _step(self, num_rows: int, params: SamplingParams) -> None:
        """One token of the first `num_rows` rows, all drawn in one way: what a graph captures."""
        from gspo.kernels.triton_decode import draw_tokens

        slots = self.slots
        logits = self._logits(num_rows)
        greedy = params.temperature == 0.0
        sampling = (
            RowSampling.of([params], slots.device)
            if not self._paged.graphs
            else _constants(params, slots.device)
        )
        cut = None
        if not greedy and (sampling.top_k is not None or sampling.top_p is not None):
            scores = logits if sampling.temperature is None else logits / sampling.temperature
            cut = cutoff(scores, sampling)
        draw_tokens(logits, slots, temperature=1.0 if greedy else params.temperature, greedy=greedy, cut=cut)

    def _step_each(self, num_rows: int) -> None:
        """One token of every row, each drawn in its own way."""
        slots = self.slots
        sampling = RowSampling.of([row.params for row in self._rows], slots.device)
        length = slots.length[:num_rows]
        draws = uniform(slots.key[:num_rows], length - slots.first[:num_rows])
        slots.record(*choose(self._logits(num_rows), sampling, None if sampling.all_greedy else draws))

    def _logits(self, num_rows: int) -> Tensor:
        slots, kv = self.slots, self._paged.allocate()
        return self._paged.logits(slots.token[:num_rows], slots.length[:num_rows], kv, self._table[:num_rows])

    def _graph(self, bucket: int, params: SamplingParams) -> Any:
        """The captured step; on a model that cannot be captured, something that replays it step by step."""
        key = (bucket, params)
        if key not in self._graphs:
            self._graphs[key] = self._capture(bucket, params)
        return self._graphs[key]

    def _capture(self, bucket: int, params: SamplingParams) -> Any:
        done = self.slots.done
        before = done.clone()
        done.fill_(True)  # rows that are done stand still, so warming up changes nothing
        try:
            try:
                self._warm_up(bucket, params)
            except Exception as error:
                if not self._paged.compiled:
                    raise
                self._paged.stop_compiling(f"{type(error).__name__}: {error}")
                self._warm_up(bucket, params)
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, pool=self._graph_memory):
                    self._step(bucket, params)
            except RuntimeError as error:
                log.warning("the decode step is not captured as a CUDA graph: %s", error)
                self._paged.graphs = False
                return _Eager(lambda: self._step(bucket, params))
            self._graph_memory = graph.pool()
            return graph
        finally:
            done.copy_(before)

    def _warm_up(self, bucket: int, params: SamplingParams) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                self._step(bucket, params)
        torch.cuda.current_stream().wait_stream(stream)


@dataclass(frozen=True, slots=True)
class _Eager:
    """A step that could not be captured, under the name of one that was."""

    replay: Any


_CONSTANTS: dict[tuple[SamplingParams, torch.device], RowSampling] = {}


def _constants(params: SamplingParams, device: torch.device) -> RowSampling:
    """The sampling tensors of `params`, made once: a captured step may not copy from the host."""
    key = (params, device)
    if key not in _CONSTANTS:
        _CONSTANTS[key] = RowSampling.of([params], device)
    return _CONSTANTS[key]


def buckets(num_slots: int) -> list[int]:
    """Batch sizes that are captured: 2, 4, 8, 16, 24, 32, 48 … up to one that holds `num_slots` rows."""
    sizes = [2, 4, 8]
    while sizes[-1] < num_slots:
        sizes.append(
            sizes[-1] * 3 // 2 if sizes[-1] & (sizes[-1] - 1) == 0 and sizes[-1] >= 16 else _above(sizes[-1])
        )
    return [s for s in sizes if s < num_slots] + [next(s for s in sizes if s >= num_slots)]


def _above(size: int) -> int:
    """The next power of two."""
    return 1 << size.bit_length()
