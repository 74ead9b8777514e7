"""Rows on KV pages, whose decode step a GPU replays as a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

from gspo.kernels.sizes import PAGE
from gspo.rollout.counter_noise import uniform
from gspo.rollout.engine import SamplingParams
from gspo.rollout.native.decode_graphs import DecodeGraphs, batch_sizes
from gspo.rollout.native.paged_model import PagedModel
from gspo.rollout.native.pages import PageAllocator
from gspo.rollout.native.runner import PageCounts, Runner
from gspo.rollout.native.slots import Slots, SlotStart
from gspo.rollout.token_sampling import RowSampling, choose, cutoff


@dataclass(slots=True)
class _Context:
    """A prefilled token list: its pages (referenced once) and its length."""

    pages: list[int]
    length: int


Prefix = list[_Context]


@dataclass(slots=True)
class _Row:
    """A running row as the host knows it."""

    pages: list[int]
    length: int  # tokens in its pages
    last: int  # position whose output is the last token allowed
    params: SamplingParams


class PagedRows(Runner):
    """A Runner over a PagedModel. A decode step runs a batch of one of a few sizes; rows beyond the running ones are idle."""

    checks_every_step = False
    packs_prefill = True

    def __init__(self, paged: PagedModel, num_slots: int, max_length: int) -> None:
        self._paged = paged
        self._batch_sizes = batch_sizes(num_slots)
        size = self._batch_sizes[-1]
        self.slots = Slots(size, max_length, paged.device)
        width = max_length // PAGE + 2
        self._table = torch.zeros(size, width, dtype=torch.int32, device=paged.device)
        self._host_table = np.zeros((size, width), dtype=np.int32)
        self._rows: list[_Row] = []
        self._graphs = DecodeGraphs(self._step, paged, self.slots)
        self._num_drawn = 0  # tokens drawn since the rows' lengths were updated
        self._same_params = True  # whether all rows have the same sampling parameters
        self._table_is_stale = True  # rows or pages changed since the last upload

    def running(self) -> AbstractContextManager[None]:
        self._paged.allocate()
        return self._paged.running()

    @property
    def _allocator(self) -> PageAllocator:
        return self._paged.allocator

    @property
    def pages(self) -> PageCounts:
        return PageCounts(self._allocator.num_usable, self._allocator.num_free)

    def prefill(self, contexts: Sequence[Sequence[int]]) -> Prefix:
        kv = self._paged.allocate()
        prefix = [_Context(self._allocator.allocate(-(-len(c) // PAGE)), len(c)) for c in contexts]
        filled = [i for i, c in enumerate(contexts) if len(c)]
        if filled:
            self._paged.prefill(kv, [contexts[i] for i in filled], [prefix[i].pages for i in filled])
        return prefix

    def num_fitting(self, contexts: Sequence[Sequence[int]], sources: Sequence[int]) -> int:
        # Every row needs a page for its tail and should find one more when it grows.
        left = self._allocator.num_free - len(self._rows)
        counted: set[int] = set()
        for num, source in enumerate(sources):
            if source < len(contexts) and source not in counted:
                counted.add(source)
                left -= -(-len(contexts[source]) // PAGE)
            left -= 2
            if left < 0:
                return num
        return len(sources)

    def place(
        self, prefix: Prefix, sources: Sequence[int], starts: Sequence[SlotStart], params: Sequence[SamplingParams]
    ) -> None:
        self._update_lengths()
        first = len(self._rows)
        copies: list[tuple[int, int]] = []  # half-filled pages: original, copy
        for source, start, row_params in zip(sources, starts, params):
            context = prefix[source]
            num_full, rest = divmod(context.length, PAGE)
            shared = context.pages[:num_full]
            self._allocator.share(shared)
            tail = self._allocator.allocate(1) if rest else []
            copies += [(context.pages[num_full], page) for page in tail]
            self._rows.append(_Row([*shared, *tail], start.length, start.last, row_params))
        self._copy(copies)
        self.slots.place(first, starts)
        self._table_is_stale = True

    def _copy(self, copies: Sequence[tuple[int, int]]) -> None:
        if copies:
            pairs = torch.tensor(copies, device=self._paged.device)
            for layer in self._paged.allocate().layers:
                for pages in layer:
                    pages[pairs[:, 1]] = pages[pairs[:, 0]]

    def keep(self, prefix: Prefix, source: int) -> Prefix:
        self._allocator.share(prefix[source].pages)
        return [prefix[source]]

    def release(self, prefix: Prefix) -> None:
        for context in prefix:
            self._allocator.release(context.pages)

    def reserve(self, num_steps: int) -> bool:
        self._update_lengths()
        needs = [-(-min(r.length + num_steps, r.last + 1) // PAGE) - len(r.pages) for r in self._rows]
        if sum(n for n in needs if n > 0) > self._allocator.num_free:
            return False
        for row, need in zip(self._rows, needs):
            if need > 0:
                row.pages += self._allocator.allocate(need)
                self._table_is_stale = True
        return True

    def remove(self, removed: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        self._update_lengths()
        for row in removed:
            self._allocator.release(self._rows[row].pages)
        for gap, mover in moves:
            self._rows[gap] = self._rows[mover]
        del self._rows[len(self._rows) - len(removed) :]
        if moves:
            gaps, movers = (torch.tensor(rows, device=self._paged.device) for rows in zip(*moves))
            self.slots.move(gaps, movers)
        self._table_is_stale = True

    def clear(self) -> None:
        for row in self._rows:
            self._allocator.release(row.pages)
        self._rows = []
        self._num_drawn, self._table_is_stale = 0, True

    def _update_lengths(self) -> None:
        for row in self._rows:
            row.length += self._num_drawn
        self._num_drawn = 0

    def decode(self) -> None:
        num_rows = len(self._rows)
        batch_size = next(size for size in self._batch_sizes if size >= num_rows)
        if self._table_is_stale:
            self._upload_table(num_rows, batch_size)
        if self._same_params:
            self._graphs.run(batch_size, self._rows[0].params)
        else:
            self._step_mixed(num_rows)
        self._num_drawn += 1

    def _upload_table(self, num_rows: int, batch_size: int) -> None:
        """Copy the rows' pages to the device, and mark the rest of the batch as done."""
        table = self._host_table
        table[:batch_size] = 0
        for number, row in enumerate(self._rows):
            table[number, : len(row.pages)] = row.pages
        self._table[:batch_size].copy_(torch.from_numpy(table[:batch_size]), non_blocking=False)
        self.slots.park(num_rows, batch_size)
        self._graphs.follow_stops()
        params = [row.params for row in self._rows]
        self._same_params = len({id(p) for p in params}) == 1 or len(set(params)) == 1
        self._table_is_stale = False

    def _step(self, num_rows: int, params: SamplingParams) -> None:
        """Draw one token for each of the first `num_rows` rows, all with `params`: what a graph captures."""
        from gspo.kernels.triton_decode import draw_tokens

        slots = self.slots
        logits = self._logits(num_rows)
        greedy = params.temperature == 0.0
        sampling = _constants(params, slots.device)
        cut = None
        if not greedy and (sampling.top_k is not None or sampling.top_p is not None):
            scores = logits if sampling.temperature is None else logits / sampling.temperature
            cut = cutoff(scores, sampling)
        draw_tokens(logits, slots, temperature=1.0 if greedy else params.temperature, greedy=greedy, cut=cut)

    def _step_mixed(self, num_rows: int) -> None:
        """Draw one token for every row, each with its own sampling parameters."""
        slots = self.slots
        sampling = RowSampling.of([row.params for row in self._rows], slots.device)
        length = slots.length[:num_rows]
        draws = uniform(slots.key[:num_rows], length - slots.first[:num_rows])
        slots.record(*choose(self._logits(num_rows), sampling, None if sampling.all_greedy else draws))

    def _logits(self, num_rows: int) -> Tensor:
        slots, kv = self.slots, self._paged.allocate()
        return self._paged.logits(slots.token[:num_rows], slots.length[:num_rows], kv, self._table[:num_rows])


@cache
def _constants(params: SamplingParams, device: torch.device) -> RowSampling:
    """The sampling tensors of `params`, made once: a captured step may not copy from the host."""
    return RowSampling.of([params], device)
