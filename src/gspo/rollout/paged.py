"""Rows on KV pages: packed prefill, and a decode step that a GPU replays as a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from gspo.models.compiled import CompiledDecoder
from gspo.models.head import Head, UnsupportedModel
from gspo.rollout.attention import attention_windows
from gspo.rollout.engine import EngineError, SamplingParams
from gspo.rollout.kv_cache import layers_of
from gspo.rollout.noise import uniform
from gspo.rollout.pages import PAGE, PAGED, OutOfPages, PackedContexts, PageBook, PagedKV
from gspo.rollout.sampling import RowSampling, choose, cutoff
from gspo.rollout.slots import Slots, SlotStart

log = logging.getLogger(__name__)

MIN_FREE_SHARE = 0.1  # of a device's free memory, left alone
WARM_UPS = 2


class PagedModel:
    """A transformers decoder that runs packed tokens [N] with their keys and values in pages.

    `memory` is how many bytes the pages may take; they are allocated when first used, for `num_tokens` tokens at most.
    """

    def __init__(
        self, model: Any, device: torch.device, *, num_tokens: int, memory: int, compiled: bool, graphs: bool
    ) -> None:
        self.model, self.device = model, device
        self.head = Head.of(model)
        self.graphs = graphs
        self.compiled = compiled
        self._num_tokens, self._memory = num_tokens, memory
        self._num_pages = 0
        configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
        self._configs = [c for c in configs.values() if getattr(c, "_attn_implementation", None) in PAGED]
        self._shapes = _kv_shapes(model, device)
        self._compiled = CompiledDecoder(model.base_model) if compiled else None
        self.kv: PagedKV | None = None
        self.book = PageBook(0)
        self.reason = self._mismatch()

    @property
    def page_bytes(self) -> int:
        """Of one page in all layers."""
        dtype = next(self.model.parameters()).dtype
        return sum(2 * PAGE * heads * size * dtype.itemsize for heads, size in self._shapes)

    def allocate(self) -> PagedKV:
        """The pages, made now if there are none."""
        if self.kv is None:
            self._num_pages = self._num_pages or self._count_pages()
            self.kv, self.book = self._pages(self._num_pages), PageBook(self._num_pages)
        return self.kv

    def _count_pages(self) -> int:
        """How many pages there are from now on: decided once, since what runs together depends on it."""
        memory = self._memory
        if self.device.type == "cuda":
            cached = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
            free = torch.cuda.mem_get_info(self.device)[0] + cached
            memory = min(memory, int(free * (1 - MIN_FREE_SHARE)))
        num_pages = min(self._num_tokens // PAGE + 2, memory // self.page_bytes)
        if num_pages < 3:
            raise EngineError(
                f"the KV cache got {memory / 2**20:.0f} MiB, not enough for three pages of {PAGE} tokens "
                f"({self.page_bytes / 2**20:.2f} MiB each); raise rollout.gpu_memory_utilization"
            )
        return num_pages

    def free(self) -> None:
        """Give the pages' memory back; nothing may be in them."""
        self.kv, self.book = None, PageBook(0)

    def _pages(self, num_pages: int) -> PagedKV:
        dtype = next(self.model.parameters()).dtype
        make = lambda heads, size: torch.zeros(num_pages, PAGE, heads, size, dtype=dtype, device=self.device)  # noqa: E731
        return PagedKV([(make(*shape), make(*shape)) for shape in self._shapes])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within this the model attends to pages, is in eval mode and records no gradient."""
        was_training = self.model.training
        if was_training:
            self.model.eval()
        before = [config._attn_implementation_internal for config in self._configs]
        for config in self._configs:
            config._attn_implementation_internal = PAGED[config._attn_implementation]
        try:
            with torch.no_grad():
                yield
        finally:
            for config, name in zip(self._configs, before):
                config._attn_implementation_internal = name
            if was_training:
                self.model.train()

    def prefill(
        self, kv: PagedKV, contexts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]]
    ) -> Tensor:
        """Fill `pages` with the keys and values of `contexts`; the hidden states [N, H], one context after another."""
        lengths = [len(c) for c in contexts]
        places = np.concatenate(
            [
                (np.asarray(own)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:num]
                for own, num in zip(pages, lengths)
            ]
        )
        tokens = torch.tensor([t for c in contexts for t in c], device=self.device)
        positions = torch.from_numpy(np.concatenate([np.arange(num) for num in lengths])).to(self.device)
        starts = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=self.device)
        kv.prefill = PackedContexts(starts, lengths, torch.from_numpy(places).to(self.device))
        try:
            return self._hidden(tokens, positions, kv)
        finally:
            kv.prefill = None

    def logits(self, tokens: Tensor, lengths: Tensor, kv: PagedKV, table: Tensor) -> Tensor:
        """Float32 logits [N,V] after appending `tokens` [N] at positions `lengths` [N] of the rows of `table`."""
        kv.table, kv.lengths = table, lengths
        with self._compiled.active() if self._compiled is not None else nullcontext():
            hidden = self._hidden(tokens, lengths, kv)
        return self.head.logits(hidden)

    def _hidden(self, tokens: Tensor, positions: Tensor, kv: PagedKV) -> Tensor:
        kv.layer = 0
        out = self.model.base_model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged=kv.number
        )
        return out.last_hidden_state[0]

    def stop_compiling(self, reason: str) -> None:
        """Run the model as it is from now on."""
        log.warning("the decode step runs uncompiled: %s", reason)
        self.compiled, self._compiled = False, None

    @torch.no_grad()
    def _mismatch(self) -> str | None:
        """Why this model does not give the hidden states of a plain forward on pages; None when it does."""
        name, size = type(self.model).__name__, self.model.get_input_embeddings().num_embeddings
        ids = torch.arange(2 * PAGE + 5, device=self.device) * 7 % size
        was_training = self.model.training
        self.model.eval()
        try:
            want = self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0].float()
            kv, last = self._pages(5), len(ids) - 1
            with self.running():
                got = [self.prefill(kv, [ids[:last].tolist(), ids[:3].tolist()], [[2, 4, 1], [3]])[:last]]
                kv.table = torch.tensor([[2, 4, 1], [0, 0, 0]], dtype=torch.int32, device=self.device)
                kv.lengths = torch.tensor([last, 0], device=self.device)
                fed = torch.stack([ids[last], ids[0]])
                got.append(self._hidden(fed, kv.lengths, kv)[:1])
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            return f"{name} does not run on pages: {type(error).__name__}: {error}"
        finally:
            self.model.train(was_training)
        off = (torch.cat(got).float() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-12)
        half = next(self.model.parameters()).dtype not in (torch.float32, torch.float64)
        allowed = 0.1 if half else 1e-3
        # In half precision a router may choose another expert for a token here and there: hence the median.
        worst = max(off[:last].median().item(), off[last:].max().item() if not half else 0.0)
        return (
            None
            if worst <= allowed
            else f"{name}: hidden states on pages differ by {worst:.2g} of their size"
        )


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
        from gspo.rollout.kernels import draw_tokens

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


def _kv_shapes(model: Any, device: torch.device) -> list[tuple[int, int]]:
    """Key heads and their size, layer by layer, as the model itself makes them."""
    attention_windows(model.config.get_text_config())
    cache = DynamicCache()
    with torch.no_grad():
        model.base_model(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device),
            past_key_values=cache,
            use_cache=True,
        )
    return [(k.shape[1], k.shape[3]) for k, _ in layers_of(cache)]


def open_pages(
    model: Any, device: torch.device, *, num_tokens: int, memory: int, compiled: bool, graphs: bool
) -> tuple[PagedModel | None, str | None]:
    """The model on pages, or the reason why it cannot run there."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None, "Triton is not installed"
    try:
        paged = PagedModel(
            model, device, num_tokens=num_tokens, memory=memory, compiled=compiled, graphs=graphs
        )
    except (UnsupportedModel, EngineError, AssertionError) as error:
        return None, str(error)
    return (paged, None) if paged.reason is None else (None, paged.reason)


__all__ = ["OutOfPages", "PagedModel", "PagedRows", "buckets", "open_pages"]
