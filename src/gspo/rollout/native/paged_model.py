"""A transformers decoder on KV pages: packed prefill, decode of one token per row, and a check that a model runs so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from gspo.kernels import UnsupportedModel
from gspo.kernels.attention_swap import configs_of, swapped_attention
from gspo.kernels.compiled_layers import CompiledLayers
from gspo.kernels.fused_projections import FusedProjections
from gspo.kernels.remappable_memory import RemappableMemory, RemappingFailed
from gspo.kernels.sizes import PAGE
from gspo.models.output_head import Head
from gspo.rollout.engine import EngineError
from gspo.rollout.native.cache_attention import CACHED
from gspo.rollout.native.decode_attention import attention_windows
from gspo.rollout.native.decoder import generating
from gspo.rollout.native.graphs import PrefillGraphs
from gspo.rollout.native.padded_cache import layers_of
from gspo.rollout.native.pages import LengthsNeeded, PackedContexts, PageAllocator, PagedKV, packed_tokens
from gspo.rollout.native.slots import upload

log = logging.getLogger(__name__)

MIN_FREE_SHARE = 0.1  # of a device's free memory, which pages never use


class PagedModel:
    """A transformers decoder that runs packed tokens [N] with their keys and values in pages.

    The pages use at most `memory` bytes and hold at most `num_tokens` tokens; they are allocated at first use. With
    `frees_pages` their memory can be freed and allocated again at the same addresses, so that captured graphs stay
    valid. `mismatch` says why the model cannot run on pages; None when it can.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        *,
        num_tokens: int,
        memory: int,
        compiled: bool,
        graphs: bool,
        prefill_tokens: int = 8192,
        max_length: int = 0,
        frees_pages: bool = False,
    ) -> None:
        self.model, self.device = model, device
        self.head = Head.of(model)
        self.graphs = graphs
        self.compiled = compiled
        self._num_tokens, self._memory = num_tokens, memory
        self._num_pages = 0
        self._frees_pages = frees_pages and device.type == "cuda"
        self._remappable: RemappableMemory | None = None
        self._configs = [c for c in configs_of(model) if c._attn_implementation in CACHED]
        self._shapes = _kv_shapes(model, device)
        self._speedups = [FusedProjections(model), CompiledLayers(model.base_model)] if compiled else []
        self.kv: PagedKV | None = None
        self.allocator = PageAllocator(0)
        self._prefill_graphs = PrefillGraphs(self, prefill_tokens, max_length)
        self.mismatch = self._find_mismatch()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        dtype = next(self.model.parameters()).dtype
        return sum(2 * PAGE * heads * size * dtype.itemsize for heads, size in self._shapes)

    def allocate(self) -> PagedKV:
        """The pages, allocated now if there are none."""
        if self.kv is None:
            self._num_pages = self._count_pages()
            self.kv = self._new_pages(self._num_pages)
        elif self._remappable is not None and not self._remappable.is_mapped:
            self._remappable.map()
            self._remappable.bytes.zero_()
        if not self.allocator.num_usable:
            self.allocator = PageAllocator(self._num_pages)
        return self.kv

    def _count_pages(self) -> int:
        """How many pages there are: decided once, since the batches of a run depend on it."""
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
        """Free the pages' memory, where that was asked for and the driver can; none may be in use."""
        if self._remappable is not None and self._remappable.is_mapped:
            self._remappable.unmap()
            self.allocator = PageAllocator(0)

    def _new_pages(self, num_pages: int, can_be_freed: bool = True) -> PagedKV:
        num_bytes, dtype = num_pages * self.page_bytes, next(self.model.parameters()).dtype
        memory = self._new_memory(num_bytes) if self._frees_pages and can_be_freed else None
        if memory is None:
            memory = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        return PagedKV.over(memory.zero_(), self._shapes, num_pages, dtype)

    def _new_memory(self, num_bytes: int) -> Tensor | None:
        """Memory that can be freed and comes back at the same address; None, with the reason logged, without it."""
        try:
            self._remappable = RemappableMemory(num_bytes, self.device)
        except RemappingFailed as error:
            log.warning("rollout.free_cache_engine has no effect: %s", error)
            return None
        return self._remappable.bytes

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy pages: pairs of an original and its copy."""
        originals, targets = upload(np.asarray(copies).T, self.device)
        self.allocate().copy(originals, targets)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within this the model attends to pages, is in eval mode and records no gradient."""
        with generating(self.model), swapped_attention(self._configs, CACHED):
            yield

    def prefill(self, contexts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]]) -> None:
        """Fill `pages` with the keys and values of `contexts`."""
        if not self._prefill_graphs.run(contexts, pages):
            laid_out = lay_out(contexts, pages, self.device)
            self.compiled_or_not(lambda: self.run_prefill(*laid_out))

    def extend(self, tokens: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], firsts: Sequence[int]) -> None:
        """Append tokens to contexts of which `pages` have the first `firsts[i]` tokens, all in one forward.

        Every token is a row of a decode step, with the pages of its context; keys and values are stored before
        attention reads them, so a token sees those before it.
        """
        table = np.zeros((sum(map(len, tokens)), max(map(len, pages))), dtype=np.int32)
        row = 0
        for own, new in zip(pages, tokens):
            table[row : row + len(new), : len(own)] = own
            row += len(new)
        ids, positions, places = upload(packed_tokens(tokens, pages, firsts), self.device)
        rows = upload(table, self.device, np.int32)
        self.compiled_or_not(lambda: self._run_extension(ids, positions, places, rows))

    def _run_extension(self, tokens: Tensor, positions: Tensor, places: Tensor, table: Tensor) -> None:
        kv = self.allocate()
        kv.table, kv.lengths, kv.places = table, positions, places
        try:
            with self._fast():
                self._hidden(tokens, positions, kv)
        finally:
            kv.places = None

    def run_prefill(self, tokens: Tensor, positions: Tensor, packed: PackedContexts) -> None:
        """Write the keys and values of packed contexts to the pages."""
        with self._fast():
            self._prefill(self.allocate(), tokens, positions, packed)

    def _prefill(self, kv: PagedKV, tokens: Tensor, positions: Tensor, packed: PackedContexts) -> Tensor:
        """The hidden states [N, H] of packed contexts, whose keys and values go to the pages."""
        kv.prefill = packed
        try:
            return self._hidden(tokens, positions, kv)
        finally:
            kv.prefill = None

    def logits(self, tokens: Tensor, lengths: Tensor, kv: PagedKV, table: Tensor) -> Tensor:
        """Float32 logits [N,V] after appending `tokens` [N] at positions `lengths` [N] of the rows of `table`."""
        kv.table, kv.lengths = table, lengths
        with self._fast():
            hidden = self._hidden(tokens, lengths, kv)
        return self.head.logits(hidden)

    @contextmanager
    def _fast(self) -> Iterator[None]:
        """Within this the layers are compiled and fused where that is switched on."""
        with ExitStack() as stack:
            for speedup in self._speedups:
                stack.enter_context(speedup.active())
            yield

    def _hidden(self, tokens: Tensor, positions: Tensor, kv: PagedKV) -> Tensor:
        kv.next_layer = 0
        out = self.model.base_model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged=kv.number
        )
        return out.last_hidden_state[0]

    def compiled_or_not(self, action: Callable[[], None]) -> None:
        """Run something; when it fails compiled, run the model uncompiled from now on and try again."""
        try:
            action()
        except Exception as error:
            if not self.compiled or isinstance(error, LengthsNeeded):
                raise
            log.warning("generation runs uncompiled: %s: %s", type(error).__name__, error)
            self.compiled, self._speedups = False, []
            action()

    def _find_mismatch(self) -> str | None:
        """How the hidden states on pages differ from those of a plain forward; None when they agree."""
        name, size = type(self.model).__name__, self.model.get_input_embeddings().num_embeddings
        ids = torch.arange(2 * PAGE + 5, device=self.device) * 7 % size
        try:
            with generating(self.model):
                want = self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0].float()
            kv, last = self._new_pages(5, can_be_freed=False), len(ids) - 1
            with self.running():
                contexts = [ids[:last].tolist(), ids[:3].tolist()]
                laid_out = lay_out(contexts, [[2, 4, 1], [3]], self.device)
                got = [self._prefill(kv, *laid_out)[:last]]
                kv.table = torch.tensor([[2, 4, 1], [0, 0, 0]], dtype=torch.int32, device=self.device)
                kv.lengths = torch.tensor([last, 0], device=self.device)
                fed = torch.stack([ids[last], ids[0]])
                got.append(self._hidden(fed, kv.lengths, kv)[:1])
        except (TypeError, ValueError, RuntimeError, IndexError, AttributeError) as error:
            return f"{name} does not run on pages: {type(error).__name__}: {error}"
        off = (torch.cat(got).float() - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-12)
        half = next(self.model.parameters()).dtype not in (torch.float32, torch.float64)
        allowed = 0.1 if half else 1e-3
        # In half precision a router may choose other experts for a few tokens: hence the median.
        worst = max(off[:last].median().item(), off[last:].max().item() if not half else 0.0)
        return None if worst <= allowed else f"{name}: hidden states on pages differ by {worst:.2g} of their size"


def lay_out(
    contexts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, Tensor, PackedContexts]:
    """Tokens [N] and positions [N] of contexts, one after another, and where their keys and values go."""
    lengths = [len(c) for c in contexts]
    tokens, positions, places = upload(packed_tokens(contexts, pages), device)
    starts = upload([0, *accumulate(lengths)], device, np.int32)
    return tokens, positions, PackedContexts(starts, places, max(lengths), lengths)


def _kv_shapes(model: Any, device: torch.device) -> list[tuple[int, int]]:
    """Key heads and their size, layer by layer, found by running the model on one token."""
    attention_windows(model.config.get_text_config())
    cache = DynamicCache()
    with torch.no_grad():
        model.base_model(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), past_key_values=cache, use_cache=True
        )
    return [(k.shape[1], k.shape[3]) for k, _ in layers_of(cache)]


def open_pages(model: Any, device: torch.device, **settings: Any) -> tuple[PagedModel | None, str | None]:
    """The PagedModel with these settings, or the reason why the model cannot run on pages."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return None, "Triton is not installed"
    try:
        paged = PagedModel(model, device, **settings)
    except (UnsupportedModel, EngineError, AssertionError) as error:
        return None, str(error)
    return (paged, None) if paged.mismatch is None else (None, paged.mismatch)
