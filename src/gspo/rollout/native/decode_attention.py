"""Decode attention in plain torch: additive masks per layer type, and grouped-query attention without copying keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from gspo.kernels.attention_swap import configs_of, refuse_unsupported
from gspo.rollout.engine import EngineError

GROUPED = {"sdpa": "gspo_decode"}  # transformers' attention → what replaces it in a decode step
_SUPPORTED_LAYERS = ("full_attention", "sliding_attention")
_SUPPORTED_ATTENTION = ("sdpa", "eager")


class DecodeMasks:
    """Builds the masks of a decode step for one model: one tensor, or one per layer type when the model mixes them."""

    def __init__(self, model: nn.Module, max_length: int, dtype: torch.dtype, device: torch.device) -> None:
        config: Any = model.config
        config = config.get_text_config()
        self._windows = attention_windows(config)
        self._by_type = getattr(config, "layer_types", None) is not None
        self._columns = torch.arange(max_length, device=device)
        self._visible = torch.zeros((), dtype=dtype, device=device)
        # The lowest finite number and not -inf: a row of -inf would turn into NaN under softmax.
        self._hidden = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=device)

    def build(self, lengths: Tensor, width: int) -> Tensor | dict[str, Tensor]:
        """Masks [B,1,1,width] of rows whose new token is at position `lengths` [B]."""
        by_window = self.by_window(lengths, width)
        masks = {layer_type: by_window[window] for layer_type, window in self._windows.items()}
        return masks if self._by_type else masks["full_attention"]

    def by_window(self, lengths: Tensor, width: int) -> dict[int | None, Tensor]:
        """The same masks by the sliding window of the layers they are for."""
        columns, last = self._columns[:width], lengths[:, None]
        hidden = columns > last
        masks = {}
        for window in set(self._windows.values()):
            outside = hidden if window is None or window >= width else hidden | (columns <= last - window)
            masks[window] = torch.where(outside, self._hidden, self._visible)[:, None, None, :]
        return masks


def attention_windows(config: Any) -> dict[str, int | None]:
    """Layer type → sliding window (None: full attention). Models with one kind of layer have one entry."""
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if layer_types is None:
        if getattr(config, "attention_chunk_size", None) is not None:
            layer_types = ["chunked_attention"]
        else:
            return {"full_attention": window}
    unknown = sorted(set(layer_types) - set(_SUPPORTED_LAYERS))
    if unknown:
        raise EngineError(
            f"model type {config.model_type!r} has layers of type {', '.join(unknown)}; the native engine runs "
            f"{' and '.join(_SUPPORTED_LAYERS)} layers. Use another model."
        )
    return {kind: window if kind == "sliding_attention" else None for kind in sorted(set(layer_types))}


def sdpa_configs(model: nn.Module) -> list[Any]:
    """The config objects of the layers that run sdpa; refuses implementations without 4D masks."""
    configs = configs_of(model)
    for config in configs:
        if config._attn_implementation not in _SUPPORTED_ATTENTION:
            raise EngineError(
                f"attn_implementation={config._attn_implementation!r}: the native engine runs "
                f"{' or '.join(_SUPPORTED_ATTENTION)}. Load the model with attn_implementation='sdpa'."
            )
    return [c for c in configs if c._attn_implementation == "sdpa"]


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, **kwargs: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """Attention of one new token per row: the query heads that share a key head become rows of one product.

    The same numbers as transformers' sdpa, which repeats keys and values for every query head when it gets a mask: in a
    decode step that copy of the whole cache costs several times the attention itself.
    """
    assert query.shape[2] == 1, "a decode step has one new token per row"
    refuse_unsupported(module, kwargs)
    out = attend_grouped(query[:, :, 0], key, value, attention_mask, scaling)
    return out[:, None], None


def attend_grouped(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Attention [B, heads, size] of one token per row, `query` [B, heads, size], to the keys and values of a cache."""
    grouped = query.reshape(len(query), keys.shape[1], -1, query.shape[-1])
    out = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return out.reshape(*query.shape[:2], values.shape[-1])


AttentionInterface.register(GROUPED["sdpa"], grouped_attention)
