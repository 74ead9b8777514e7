"""The native engine: rollouts from the trainer's own modules, in process, without a copy of the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gspo.kernels.compiled_layers import worth_compiling
from gspo.kernels.sizes import PAGE
from gspo.metrics import Metric, Metrics
from gspo.rollout.engine import GroupRequest, RolloutEngine, Written, check_request
from gspo.rollout.native.decoder import Decoder
from gspo.rollout.native.padded_rows import PaddedRows
from gspo.rollout.native.paged_model import PagedModel, open_pages
from gspo.rollout.native.paged_rows import PagedRows
from gspo.rollout.native.slot_pool import PREFILL_TOKENS, CacheFull, PoolStats, SlotPool
from gspo.types import Group

DECODE_CHUNK = 8  # tokens per row and step
# On a GPU a row that ends is replaced after one and a half chunks on average, and every chunk costs some work between two
# decode steps: chunks are long when few rows end (with 1 of 100 rows per token, 4 tokens; with 1 of 1,000, 12).
GPU_DECODE_CHUNKS = (2, 16)
CHUNK_SCALE = 0.4
AHEAD = 8  # with pages, prompts for an eighth of the slots are prefilled ahead


class NativeEngine(RolloutEngine):
    """A RolloutEngine over any transformers decoder.

    `num_slots` responses run at once, each of at most `max_length` tokens with its prompt; a step decodes
    `decode_chunk` tokens (8; on a GPU 2 to 16, by how often rows end). For the same calls it gives the same bits.
    Tokens are its whole state after `load_weights`: it then forgets every cache and continues its groups from their
    tokens, exactly as a fresh engine would that gets `unfinished()`.

    On a GPU (or with `paged`) the cache is a pool of pages of at most `memory_utilization` of the device's memory, and
    prefills and decode steps are compiled and replayed as CUDA graphs unless `eager`; with `free_cache`, `rest` frees
    the pool's memory. With `share_prefixes` the pages of finished requests with `hold` stay until memory is needed, and
    later prompts that begin like them start from there. `keep_cache` continues running responses on keys and values of
    older weights: see `load_weights`. On a CPU the layers of larger models are compiled unless `eager`. `description`
    says what runs, and why pages are not used where they would be expected.
    """

    def __init__(
        self,
        model: Any,
        tokenizer_decode: Callable[[Sequence[int]], str],
        *,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        num_slots: int,
        max_length: int,
        decode_chunk: int | None = None,
        device: torch.device | str = "cpu",
        version: int = 0,
        prefill_tokens: int = PREFILL_TOKENS,
        paged: bool | None = None,
        memory_utilization: float = 0.5,
        eager: bool = False,
        free_cache: bool = False,
        keep_cache: bool = False,
        share_prefixes: bool = False,
    ) -> None:
        self._device = torch.device(device)
        on_cpu = self._device.type == "cpu"
        if decode_chunk is None and on_cpu:
            decode_chunk = DECODE_CHUNK
        for name, value in (
            ("num_slots", num_slots),
            ("max_length", max_length),
            ("decode_chunk", decode_chunk),
            ("prefill_tokens", prefill_tokens),
        ):
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: expected at least 1")
        compiled = on_cpu and not paged and not eager and worth_compiling(model)
        self._decoder = Decoder(model, pad_token_id, max_length, self._device, compiled=compiled)
        self._max_length = max_length
        self._decode_chunk = decode_chunk
        self._version = version
        self._num_slots = num_slots
        self._pool_settings = {
            "detokenize": tokenizer_decode,
            "eos_token_ids": eos_token_ids,
            "prefill_tokens": prefill_tokens,
            "share_prefixes": share_prefixes,
        }
        self._free_cache, self._keep_cache = free_cache, keep_cache
        self._paged, self._why_not_paged = self._open_pages(paged, memory_utilization, eager)
        self._num_ahead = 0 if self._paged is None else -(-num_slots // AHEAD)
        self._pool = self._new_pool(num_slots)
        self._generate_pool: SlotPool | None = None  # kept for the next `generate` when it has captured steps

    @property
    def num_in_flight(self) -> int:
        return self._pool.num_groups

    def submit(self, request: GroupRequest) -> None:
        check_request(request, self._max_length)
        self._pool.submit(request)

    def num_wanted(self, limit: int) -> int | None:
        """With pages a few more than the slots hold: their prompts are prefilled ahead. None without pages."""
        if self._paged is None:
            return None
        most = min(limit, self._num_slots)
        return most + self._num_ahead * most // self._num_slots - self._pool.num_responses

    def step(self) -> list[Group]:
        return self._advance(self._pool)

    def _advance(self, pool: SlotPool) -> list[Group]:
        return pool.advance(self._decode_chunk or decode_chunk(pool.ended_per_token), self._version)

    def written(self) -> list[Written]:
        return self._pool.take_written()

    def cancel(self, submission: int, response: int) -> None:
        self._pool.cancel(submission, response, self._version)

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        for request in requests:
            check_request(request, self._max_length)
        if not requests:
            return []
        num_responses = sum(request.n for request in requests)
        pool = self._pool_for_generate(num_responses)
        progress = [pool.submit(request) for request in requests]
        while pool.num_groups:
            try:
                self._advance(pool)
            except CacheFull:
                if not self._pool.holds_cache:
                    raise
                self._pool.rewind(self._version)  # groups in flight continue from their tokens afterwards
        return [p.group() for p in progress]

    def load_weights(self, weights: Mapping[str, Tensor] | None, version: int) -> None:
        """Make new weights live. Tensors are copied into the modules; None: the modules themselves have changed.

        Caches are forgotten and built again from the tokens. With `keep_cache` running responses keep theirs: the keys
        and values of their earlier tokens come from older weights, and their log-probs are those of that mixture.
        """
        if weights is not None:
            copy_weights(weights, self._decoder.model)
        if self._keep_cache:
            self._pool.close_version(self._version)
        else:
            self._pool.rewind(self._version)
        if self._generate_pool is not None:
            self._generate_pool.clear()
        self._version = version

    def unfinished(self) -> list[GroupRequest]:
        """With `keep_cache` the caches are forgotten here, so that a fresh engine continues to the same bits."""
        if self._keep_cache:
            self._pool.rewind(self._version)
        return self._pool.unfinished(self._version)

    def rest(self) -> None:
        """With `free_cache`, free the pages: responses continue from their tokens afterwards."""
        if self._free_cache and self._paged is not None:
            self._pool.rewind(self._version)
            if self._generate_pool is not None:
                self._generate_pool.clear()
            self._paged.free()

    def release(self, submission: int, response: int) -> None:
        for pool in (self._pool, self._generate_pool):
            if pool is not None:
                pool.release(submission, response)

    def metrics(self) -> Metrics:
        """`rollout/prefix_saved`: of the tokens of continued responses, the share whose cache was still there."""
        stats = [pool.stats for pool in (self._pool, self._generate_pool) if pool is not None]
        num_continued = sum(each.num_continued for each in stats)
        if not num_continued or self._paged is None:
            return {}
        return {"rollout/prefix_saved": Metric("last", sum(each.num_reused for each in stats) / num_continued)}

    def clear(self) -> None:
        self._pool.clear()

    def close(self) -> None:
        self._pool.clear()

    @property
    def stats(self) -> PoolStats:
        """What runs now, and what was prefilled so far, not counting `generate`."""
        return self._pool.stats

    @property
    def description(self) -> str:
        """How decode steps run, in words."""
        if self._paged is None:
            how = "padded cache, compiled" if self._decoder.compiled else "padded cache"
            return how + (f" ({self._why_not_paged})" if self._why_not_paged else "")
        how = [("compiled", self._paged.compiled), ("CUDA graphs", self._paged.graphs)]
        return ", ".join(["paged cache", *(word for word, used in how if used)])

    def _open_pages(self, wanted: bool | None, share: float, eager: bool) -> tuple[PagedModel | None, str | None]:
        """The model on pages, or None and the reason when pages are wanted but the model does not run on them."""
        cuda = self._device.type == "cuda"
        if not (cuda if wanted is None else wanted):
            return None, None
        total = torch.cuda.mem_get_info(self._device)[1] if cuda else 1 << 30
        fast = cuda and not eager
        return open_pages(
            self._decoder.model,
            self._device,
            num_tokens=self._num_slots * (self._max_length + 2 * PAGE),
            memory=int(share * total),
            compiled=fast and worth_compiling(self._decoder.model),
            graphs=fast,
            prefill_tokens=self._pool_settings["prefill_tokens"],
            max_length=self._max_length,
            frees_pages=self._free_cache,
        )

    def _pool_for_generate(self, num_responses: int) -> SlotPool:
        """An empty pool beside the one of the groups in flight."""
        if self._paged is None:
            return self._new_pool(min(self._num_slots, num_responses))
        if self._generate_pool is None:
            self._generate_pool = self._new_pool(self._num_slots)
        if self._generate_pool.num_groups:  # of a call that failed
            self._generate_pool.clear()
        return self._generate_pool

    def _new_pool(self, num_slots: int) -> SlotPool:
        if self._paged is None:
            rows = PaddedRows(self._decoder, num_slots, self._max_length)
        else:
            rows = PagedRows(self._paged, num_slots, self._max_length)
        return SlotPool(rows, num_slots=num_slots, num_ahead=self._num_ahead, **self._pool_settings)


def decode_chunk(ended_per_token: float) -> int:
    """Tokens per row and step on a GPU, when this share of the rows ends with every token."""
    low, high = GPU_DECODE_CHUNKS
    return max(low, min(high, round(CHUNK_SCALE / ended_per_token**0.5)))


@torch.no_grad()
def copy_weights(weights: Mapping[str, Tensor], model: Any) -> None:
    """Copy named tensors into the model in place; refuses an unknown name or another shape."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    for name, tensor in weights.items():
        if name not in own:
            raise KeyError(f"weights hold {name!r}, which the engine's model does not have")
        if own[name].shape != tensor.shape:
            raise ValueError(f"weights {name!r}: shape {tuple(tensor.shape)}, expected {tuple(own[name].shape)}")
        own[name].copy_(tensor)
