"""Rows on KV pages, whose decode step a GPU replays as a CUDA graph."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gspo.kernels.sizes import PAGE
from gspo.rollout.counter_noise import uniform
from gspo.rollout.engine import SamplingParams
from gspo.rollout.native.graphs import DecodeGraphs, batch_sizes
from gspo.rollout.native.paged_model import PagedModel
from gspo.rollout.native.pages import PageAllocator
from gspo.rollout.native.runner import HoldingRunner, PageCounts
from gspo.rollout.native.slots import Slots, SlotStart, upload
from gspo.rollout.token_sampling import RowSampling, choose, cutoff


@dataclass(slots=True)
class _Context:
    """A prefilled token list: its pages (referenced once) and its length."""

    pages: list[int]
    length: int


class PagedRows(HoldingRunner):
    """A Runner over a PagedModel. A decode step runs a batch of one of a few sizes; rows beyond the running ones are idle.

    The host keeps the rows' pages, lengths and limits itself and never waits for the device. A row that is done counts
    as growing until it is removed, so its length here may exceed the true one.
    """

    checks_every_step = False
    packs_prefill = True

    def __init__(self, paged: PagedModel, num_slots: int, max_length: int) -> None:
        self._paged = paged
        self._batch_sizes = batch_sizes(num_slots)
        size = self._batch_sizes[-1]
        self.slots = Slots(size, max_length, paged.device)
        width = max_length // PAGE + 2
        self._table = torch.zeros(size, width, dtype=torch.int32, device=paged.device)
        self._pages = np.zeros((size, width), dtype=np.int32)  # of each row; 0 where it has none
        self._num_pages, self._length, self._last = np.zeros((3, size), dtype=np.int64)  # per row
        self._params: list[SamplingParams] = []  # of the rows 0..B-1
        self._sampling: dict[SamplingParams, RowSampling] = {}
        self._decode_graphs = DecodeGraphs(self._step, paged, self.slots, forget=lambda p: self._sampling.pop(p, None))
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

    def prefill(self, contexts: Sequence[Sequence[int]]) -> list[_Context]:
        prefixes = [_Context(self._allocator.allocate(-(-len(c) // PAGE)), len(c)) for c in contexts]
        filled = [i for i, c in enumerate(contexts) if len(c)]
        if filled:
            self._paged.prefill([contexts[i] for i in filled], [prefixes[i].pages for i in filled])
        return prefixes

    def detach(self, row: int, length: int) -> _Context:
        own = self._pages[row, : self._num_pages[row]].tolist()
        self._pages[row], self._num_pages[row] = 0, 0
        return self._shortened(_Context(own, length), length)

    def fork(self, prefix: _Context, length: int) -> tuple[_Context, int]:
        num_pages = length // PAGE  # whole pages can be shared
        pages = prefix.pages[:num_pages]
        self._allocator.share(pages)
        return _Context(pages, num_pages * PAGE), num_pages * PAGE

    def extend(
        self, prefixes: Sequence[_Context], lengths: Sequence[int], tokens: Sequence[Sequence[int]]
    ) -> list[_Context]:
        longer = []
        for prefix, length, new in zip(prefixes, lengths, tokens):
            kept, total = self._shortened(prefix, length), length + len(new)
            more = self._allocator.allocate(max(0, -(-total // PAGE) - len(kept.pages)))
            longer.append(_Context([*kept.pages, *more], total))
        filled = [i for i, new in enumerate(tokens) if len(new)]
        if filled:
            pages = [longer[i].pages for i in filled]
            self._paged.extend([tokens[i] for i in filled], pages, [lengths[i] for i in filled])
        return longer

    def _shortened(self, context: _Context, length: int) -> _Context:
        """The first tokens of a context; pages behind them are released."""
        num_pages = -(-length // PAGE)
        self._allocator.release(context.pages[num_pages:])
        return _Context(context.pages[:num_pages], length)

    def num_fitting(self, needs: Sequence[int]) -> int:
        # Every row needs a page for its tail and should find one more when it grows.
        left = self._allocator.num_free - len(self._params)
        for num, need in enumerate(needs):
            left -= -(-need // PAGE) + 2
            if left < 0:
                return num
        return len(needs)

    def place(
        self, prefixes: Sequence[_Context], starts: Sequence[SlotStart], params: Sequence[SamplingParams]
    ) -> None:
        first = len(self._params)
        copies: list[tuple[int, int]] = []  # half-filled pages: original, copy
        for row, (context, start) in enumerate(zip(prefixes, starts), first):
            num_full, rest = divmod(context.length, PAGE)
            shared = context.pages[:num_full]
            self._allocator.share(shared)
            tail = self._allocator.allocate(1) if rest else []
            copies += [(context.pages[num_full], page) for page in tail]
            own = [*shared, *tail]
            self._pages[row, : len(own)] = own
            self._num_pages[row], self._length[row], self._last[row] = len(own), start.length, start.last
        self._params += params
        if copies:
            self._paged.copy_pages(copies)
        self.slots.place(first, starts)
        self._table_is_stale = True

    def release(self, prefix: _Context) -> None:
        self._allocator.release(prefix.pages)

    def reserve(self, num_steps: int) -> bool:
        rows = slice(len(self._params))
        ends = np.minimum(self._length[rows] + num_steps, self._last[rows] + 1)
        needs = -(-ends // PAGE) - self._num_pages[rows]
        growing = np.flatnonzero(needs > 0)
        if needs[growing].sum() > self._allocator.num_free:
            return False
        for row in growing.tolist():
            have, need = self._num_pages[row], needs[row]
            self._pages[row, have : have + need] = self._allocator.allocate(need)
            self._num_pages[row] += need
        self._table_is_stale |= bool(len(growing))
        return True

    def remove(self, removed: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        for row in removed:
            self._release_row(row)
        left = len(self._params) - len(removed)
        if moves:
            gaps, movers = (list(rows) for rows in zip(*moves))
            for values in (self._pages, self._num_pages, self._length, self._last):
                values[gaps] = values[movers]
            for gap, mover in moves:
                self._params[gap] = self._params[mover]
            targets, sources = upload([gaps, movers], self.slots.device)
            self.slots.move(targets, sources)
        self._pages[left : len(self._params)] = 0
        del self._params[left:]
        self._table_is_stale = True

    def _release_row(self, row: int) -> None:
        self._allocator.release(self._pages[row, : self._num_pages[row]].tolist())
        self._pages[row] = 0

    def clear(self) -> None:
        for row in range(len(self._params)):
            self._release_row(row)
        self._params, self._table_is_stale = [], True

    def decode(self) -> None:
        num_rows = len(self._params)
        batch_size = next(size for size in self._batch_sizes if size >= num_rows)
        if self._table_is_stale:
            self._upload_table(num_rows, batch_size)
        if self._same_params:
            self._decode_graphs.run(batch_size, self._params[0].drawing)
        else:
            self._step_mixed(num_rows)
        self._length[:num_rows] += 1

    def _upload_table(self, num_rows: int, batch_size: int) -> None:
        """Copy the rows' pages to the device, and mark the rest of the batch as done."""
        self._table[:batch_size] = upload(self._pages[:batch_size], self.slots.device, np.int32)
        self.slots.park(num_rows, batch_size)
        self._decode_graphs.follow_stops()
        drawings = {p.drawing for p in {id(p): p for p in self._params}.values()}
        self._same_params = len(drawings) == 1 and not any(p.num_top for p in drawings)
        self._table_is_stale = False

    def _step(self, num_rows: int, params: SamplingParams) -> None:
        """Draw one token for each of the first `num_rows` rows, all with `params`: what a graph captures."""
        from gspo.kernels.triton_decode import draw_tokens

        slots = self.slots
        logits = self._logits(num_rows)
        greedy = params.temperature == 0.0
        sampling = self._constants(params)
        cut = None
        if not greedy and (sampling.top_k is not None or sampling.top_p is not None):
            scores = logits if sampling.temperature is None else logits / sampling.temperature
            cut = cutoff(scores, sampling)
        draw_tokens(logits, slots, temperature=1.0 if greedy else params.temperature, greedy=greedy, cut=cut)

    def _step_mixed(self, num_rows: int) -> None:
        """Draw one token for every row, each with its own sampling parameters."""
        slots = self.slots
        sampling = RowSampling.of(self._params, slots.device)
        length = slots.length[:num_rows]
        draws = uniform(slots.key[:num_rows], length - slots.first[:num_rows])
        logits = self._logits(num_rows)
        if sampling.any_top:
            slots.record_top(logits, sampling.temperature)
        slots.record(*choose(logits, sampling, None if sampling.all_greedy else draws))

    def _logits(self, num_rows: int) -> Tensor:
        slots, kv = self.slots, self._paged.allocate()
        return self._paged.logits(slots.token[:num_rows], slots.length[:num_rows], kv, self._table[:num_rows])

    def _constants(self, params: SamplingParams) -> RowSampling:
        """The sampling tensors of `params`, made once: a captured step may not copy from the host."""
        if params not in self._sampling:
            self._sampling[params] = RowSampling.of([params], self.slots.device)
        return self._sampling[params]
