"""A transformers model on padded rows: prefill of padded prompts, and decode of one token per row."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache, DynamicCache

from gspo.kernels.attention_swap import swapped_attention
from gspo.kernels.small_batch_linear import SmallBatchLinear
from gspo.rollout.engine import EngineError
from gspo.rollout.native.decode_attention import GROUPED, DecodeMasks, sdpa_configs
from gspo.rollout.native.packed_decoder import PackedDecoder
from gspo.rollout.native.padded_cache import LayerKV, SlotCache, layers_of


class Decoder:
    """Runs a causal language model through its own modules and tensors; no weight is copied, no gradient recorded."""

    def __init__(
        self, model: Any, pad_token_id: int, max_length: int, device: torch.device, *, compiled: bool = False
    ) -> None:
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and max_length > limit:
            raise EngineError(
                f"max_length={max_length} (prompt and response) exceeds the model's max_position_embeddings={limit}; "
                "lower data.max_prompt_length or data.max_response_length."
            )
        if "position_ids" not in inspect.signature(model.base_model.forward).parameters:
            raise EngineError(
                f"{type(model).__name__} has no position_ids: it places tokens by the attention mask (ALiBi), and the native "
                "engine cannot run it; set actor_rollout_ref.rollout.name=vllm, or choose a model of another family"
            )
        self.model = model
        self.device = device
        self._pad = pad_token_id
        self._configs = sdpa_configs(model)
        self._small_batch = SmallBatchLinear(model)
        self._masks = DecodeMasks(model, max_length, next(model.parameters()).dtype, device)
        on_cpu = device.type == "cpu"
        with generating(model):
            self._packed = PackedDecoder.of(model, self._configs, self._masks, compiled) if on_cpu else None
        forward = inspect.signature(model.forward).parameters
        # Only the last position's logits are needed; a model without this argument computes them all.
        self._last_only: dict[str, int] = {"logits_to_keep": 1} if "logits_to_keep" in forward else {}

    def prefill(self, contexts: Sequence[Sequence[int]]) -> list[LayerKV]:
        """Keys and values of these token lists, right-padded to the longest: [len(contexts), heads, longest, size].

        Padding comes after every real token, so causal masking alone hides it; the mask of ones asks for no other.
        """
        width = max(len(c) for c in contexts)
        padded = torch.tensor([[*c, *[self._pad] * (width - len(c))] for c in contexts], device=self.device)
        positions = torch.arange(width, device=self.device).expand(len(contexts), width)
        cache = DynamicCache()
        self._forward(padded, torch.ones_like(padded), positions, cache)
        return layers_of(cache)

    def _forward(self, ids: Tensor, mask: Tensor | dict[str, Tensor], positions: Tensor, cache: Cache) -> Any:
        inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        return self.model(**inputs, use_cache=True, **self._last_only)

    @property
    def uses_kernel(self) -> bool:
        """Whether decode steps run gspo's CPU attention kernel."""
        return self._packed is not None and self._packed.uses_kernel

    @property
    def compiled(self) -> bool:
        """Whether decode steps run compiled layers."""
        return self._packed is not None and self._packed.compiled

    @contextmanager
    def decoding(self) -> Iterator[None]:
        """Within this `decode` may be called."""
        if self._packed is not None:
            with self._packed.active():
                yield
            return
        with swapped_attention(self._configs, GROUPED), self._small_batch.active():
            yield

    def decode(self, tokens: Tensor, lengths: Tensor, cache: SlotCache, width: int) -> Tensor:
        """Logits [B,V] after appending `tokens` [B] at positions `lengths` [B]; `cache.begin_step` came before."""
        if self._packed is not None:
            return self._packed.logits(tokens, lengths, cache, width)
        return self._forward(tokens[:, None], self._masks.build(lengths, width), lengths[:, None], cache).logits[:, -1]


@contextmanager
def generating(model: nn.Module) -> Iterator[None]:
    """Within this the model is in eval mode and records no gradient.

    `no_grad` and not `inference_mode`: modules may cache a tensor in their forward (rotary tables do), and an inference
    tensor left in a module would break the next training forward.
    """
    was_training = model.training
    if was_training:
        model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        if was_training:
            model.train()
