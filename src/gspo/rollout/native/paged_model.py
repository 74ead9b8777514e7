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
from gspo.kernels.sizes import PAGE
from gspo.models.output_head import Head
from gspo.rollout.engine import EngineError
from gspo.rollout.native.cache_attention import CACHED
from gspo.rollout.native.decode_attention import attention_windows
from gspo.rollout.native.decoder import generating
from gspo.rollout.native.padded_cache import layers_of
from gspo.rollout.native.pages import PackedContexts, PageAllocator, PagedKV

log = logging.getLogger(__name__)

MIN_FREE_SHARE = 0.1  # of a device's free memory, which pages never use


class PagedModel:
    """A transformers decoder that runs packed tokens [N] with their keys and values in pages.

    The pages use at most `memory` bytes and hold at most `num_tokens` tokens; they are allocated at first use.
    `mismatch` says why the model cannot run on pages; None when it can.
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
        self._configs = [c for c in configs_of(model) if c._attn_implementation in CACHED]
        self._shapes = _kv_shapes(model, device)
        self._speedups = [FusedProjections(model), CompiledLayers(model.base_model)] if compiled else []
        self.kv: PagedKV | None = None
        self.on_free: list[Callable[[], None]] = []  # called before the pages are freed
        self.allocator = PageAllocator(0)
        self.mismatch = self._find_mismatch()

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in all layers."""
        dtype = next(self.model.parameters()).dtype
        return sum(2 * PAGE * heads * size * dtype.itemsize for heads, size in self._shapes)

    def allocate(self) -> PagedKV:
        """The pages, allocated now if there are none."""
        if self.kv is None:
            self._num_pages = self._num_pages or self._count_pages()
            self.kv, self.allocator = self._new_pages(self._num_pages), PageAllocator(self._num_pages)
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
        """Free the pages' memory; none may be in use."""
        for call in self.on_free:
            call()
        self.kv, self.allocator = None, PageAllocator(0)

    def _new_pages(self, num_pages: int) -> PagedKV:
        dtype = next(self.model.parameters()).dtype
        make = lambda heads, size: torch.zeros(num_pages, PAGE, heads, size, dtype=dtype, device=self.device)  # noqa: E731
        return PagedKV([(make(*shape), make(*shape)) for shape in self._shapes])

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within this the model attends to pages, is in eval mode and records no gradient."""
        with generating(self.model), swapped_attention(self._configs, CACHED):
            yield

    def prefill(self, kv: PagedKV, contexts: Sequence[Sequence[int]], pages: Sequence[Sequence[int]]) -> Tensor:
        """Fill `pages` with the keys and values of `contexts`; the hidden states [N, H], one context after another."""
        lengths = [len(c) for c in contexts]
        places = np.concatenate(
            [(np.asarray(own)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)[:num] for own, num in zip(pages, lengths)]
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
        with ExitStack() as stack:
            for speedup in self._speedups:
                stack.enter_context(speedup.active())
            hidden = self._hidden(tokens, lengths, kv)
        return self.head.logits(hidden)

    def _hidden(self, tokens: Tensor, positions: Tensor, kv: PagedKV) -> Tensor:
        kv.next_layer = 0
        out = self.model.base_model(
            input_ids=tokens[None], position_ids=positions[None], use_cache=False, paged=kv.number
        )
        return out.last_hidden_state[0]

    def stop_compiling(self, reason: str) -> None:
        """Run the model uncompiled from now on."""
        log.warning("the decode step runs uncompiled: %s", reason)
        self.compiled, self._speedups = False, []

    def _find_mismatch(self) -> str | None:
        """How the hidden states on pages differ from those of a plain forward; None when they agree."""
        name, size = type(self.model).__name__, self.model.get_input_embeddings().num_embeddings
        ids = torch.arange(2 * PAGE + 5, device=self.device) * 7 % size
        try:
            with generating(self.model):
                want = self.model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0].float()
            kv, last = self._new_pages(5), len(ids) - 1
            with self.running():
                got = [self.prefill(kv, [ids[:last].tolist(), ids[:3].tolist()], [[2, 4, 1], [3]])[:last]]
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


def _kv_shapes(model: Any, device: torch.device) -> list[tuple[int, int]]:
    """Key heads and their size, layer by layer, found by running the model on one token."""
    attention_windows(model.config.get_text_config())
    cache = DynamicCache()
    with torch.no_grad():
        model.base_model(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=device), past_key_values=cache, use_cache=True
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
        paged = PagedModel(model, device, num_tokens=num_tokens, memory=memory, compiled=compiled, graphs=graphs)
    except (UnsupportedModel, EngineError, AssertionError) as error:
        return None, str(error)
    return (paged, None) if paged.mismatch is None else (None, paged.mismatch)
