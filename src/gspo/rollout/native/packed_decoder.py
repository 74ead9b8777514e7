"""Decode steps on a CPU over one packed row: attention by gspo's kernel, layers compiled where that pays."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from gspo.kernels import UnsupportedModel, small_batch_linear
from gspo.kernels.attention_swap import configs_of, swapped_attention
from gspo.kernels.compiled_layers import CompiledLayers
from gspo.kernels.cpu_attention import supports
from gspo.kernels.fused_projections import FusedProjections
from gspo.kernels.small_batch_linear import SmallBatchLinear
from gspo.models.output_head import Head
from gspo.rollout.native.cache_attention import CACHED
from gspo.rollout.native.decode_attention import DecodeMasks
from gspo.rollout.native.padded_cache import SlotCache

log = logging.getLogger(__name__)

TRIAL_ROWS = 16  # of the first step, always: compiled code depends on the sizes that it first saw


class PackedDecoder:
    """Logits of one new token per row, for rows in a SlotCache."""

    def __init__(self, model: Any, configs: list[Any], masks: DecodeMasks, compiled: bool) -> None:
        self._model, self._configs, self._masks = model, configs, masks
        self.uses_kernel = supports(model)
        self._head = Head.of(model)
        self._fused, self._small_batch = FusedProjections(model), SmallBatchLinear(model)
        self._layers = CompiledLayers(model.base_model) if compiled else None

    @property
    def compiled(self) -> bool:
        return self._layers is not None

    @contextmanager
    def active(self) -> Iterator[None]:
        """Within this `logits` may be called."""
        with ExitStack() as stack:
            stack.enter_context(swapped_attention(self._configs, CACHED))
            stack.enter_context(self._fused.active())
            stack.enter_context(self._small_batch.active())
            if self._layers is not None:
                stack.enter_context(self._layers.active())
            yield

    def logits(self, tokens: Tensor, lengths: Tensor, cache: SlotCache, width: int) -> Tensor:
        """Float32 logits [B,V] after appending `tokens` [B] at `lengths` [B]; `cache.begin_step` came before."""
        if not self.uses_kernel:
            cache.masks = self._masks.by_window(lengths, width)
        single = len(tokens) == 1  # torch would compile another variant for it
        with self._layers.paused() if self._layers is not None and single else nullcontext():
            out = self._model.base_model(
                input_ids=tokens[None], position_ids=lengths[None], use_cache=False, paged=cache.number
            )
        return self._head.logits(out.last_hidden_state[0], multiply=small_batch_linear.linear)

    @staticmethod
    def of(model: Any, configs: list[Any], masks: DecodeMasks, compiled: bool) -> PackedDecoder | None:
        """A decoder whose logits were checked against the model's; None, with the reason logged, if they differ."""
        if not compiled and not supports(model):
            return None
        if len(configs_of(model)) != len(configs):  # some layers run another attention than sdpa
            return None
        try:
            packed = PackedDecoder(model, configs, masks, compiled)
            problem = packed._problem()
        except UnsupportedModel as error:
            problem = str(error)
        except Exception as error:  # a broken compiler, missing headers, a model that cannot be traced
            problem = f"{type(error).__name__}: {error}".split("\n")[0]
        if problem is None:
            return packed
        if compiled:
            log.warning("generation runs uncompiled: %s", problem)
            return PackedDecoder.of(model, configs, masks, compiled=False)
        log.debug("generation runs without gspo's CPU kernels: %s", problem)
        return None

    def _problem(self) -> str | None:
        """How the logits of the second token differ from those of a plain forward; None when they agree."""
        model, num = self._model, self._model.get_input_embeddings().num_embeddings
        ids = torch.arange(2 * TRIAL_ROWS).view(TRIAL_ROWS, 2) * 7 % num
        cache = SlotCache(TRIAL_ROWS, 2, self.uses_kernel)
        want = model(input_ids=ids, use_cache=False).logits[:, 1].float()
        with self.active():
            for position in range(2):
                lengths = torch.full((TRIAL_ROWS,), position)
                cache.begin_step(lengths, position + 1)
                got = self.logits(ids[:, position], lengths, cache, position + 1)
        worst = ((got - want).norm(dim=-1) / want.norm(dim=-1).clamp(min=1e-12)).max().item()
        return None if worst <= 1e-3 else f"its logits differ by {worst:.2g} of their size"
