"""Attention over packed tokens, in place of transformers' functions during a packed forward or its backward.

transformers calls these with query, key and value [1, heads, N, size], `layout` or `spans` from `Layout.arguments`, and
as `options` the layer's `scaling`, `sliding_window` and `softcap`. The result is [1, N, heads, size].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from gspo.kernels.attention_swap import refuse_unsupported
from gspo.training.batch.packing import Block, Layout
from gspo.training.parallel.sequence import SequenceRanks

# transformers' attention → the function that replaces it.
PADDED = {"sdpa": "gspo_packed", "eager": "gspo_packed_eager"}
FLEX = {"sdpa": "gspo_packed_flex"}
FLASH = {"sdpa": "gspo_packed_flash"}


@torch.compiler.disable  # blocks are cut differently for every batch
def attend_padded(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, layout: Layout, **options: Any
) -> tuple[Tensor, None]:
    """SDPA block by block, without a softcap, as transformers' sdpa."""
    refuse_unsupported(module, options)
    q, k, v = _tokens_first(query, key, value)
    outs = []
    for block in layout.blocks:
        out = _sdpa(block, *_cut_out(block, q, k, v), options.get("scaling"), options.get("sliding_window"))
        outs.append(block.queries.unpad(out.transpose(1, 2)))
    return _joined(outs), None


@torch.compiler.disable
def attend_eager(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, layout: Layout, **options: Any
) -> tuple[Tensor, None]:
    """As `attend_padded`, by products and a softmax, with the softcap of eager attention."""
    refuse_unsupported(module, options)
    softcap, window = options.get("softcap"), options.get("sliding_window")
    q, k, v = _tokens_first(query, key, value)
    scale = _scale(q, options)
    outs = []
    for block in layout.blocks:
        bq, bk, bv = _cut_out(block, q, k, v)
        bk, bv = (x.repeat_interleave(bq.shape[1] // x.shape[1], dim=1) for x in (bk, bv))
        scores = bq @ bk.transpose(2, 3) * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = scores + block.mask(window, scores.dtype)
        weights = scores.softmax(-1, dtype=torch.promote_types(scores.dtype, torch.float32)).to(scores.dtype)
        outs.append(block.queries.unpad((weights @ bv).transpose(1, 2)))
    return _joined(outs), None


def _tokens_first(*heads_first: Tensor) -> list[Tensor]:
    """[1, heads, N, size] → [N, heads, size]."""
    return [x[0].transpose(0, 1) for x in heads_first]


def _scale(query: Tensor, options: dict[str, Any]) -> float:
    scaling = options.get("scaling")
    return query.shape[-1] ** -0.5 if scaling is None else scaling


def _cut_out(block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The block's queries, keys and values, [rows, heads, tokens, size]; a prefix comes before its sequence's keys."""
    queries = block.queries
    query, key, value = queries.pad(q), queries.pad(k), queries.pad(v)
    if block.prefix is not None:
        key = torch.cat([block.expand_prefix(k), key], dim=1)
        value = torch.cat([block.expand_prefix(v), value], dim=1)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _sdpa(block: Block, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None) -> Tensor:
    if window is not None and window >= key.shape[2]:
        window = None
    causal = block.prefix is None and window is None
    mask = None if causal else _mask(block, window, query, key)
    gqa = query.shape[1] != key.shape[1]
    if gqa and query.is_cuda and mask is not None:
        # On a GPU the kernels with a mask do not support grouped heads.
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
        gqa = False
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=gqa
    )


def _mask(block: Block, window: int | None, query: Tensor, key: Tensor) -> Any:
    """The block's mask; on a GPU, where it is equivalent, a diagonal that the flash kernel supports."""
    same_prefix = block.prefix is not None and len(set(block.prefix.lengths)) == 1
    if query.is_cuda and window is None and same_prefix:
        return causal_lower_right(query.shape[2], key.shape[2])
    return block.mask(window, query.dtype)


def _joined(outs: list[Tensor]) -> Tensor:
    """The blocks' tokens one after another, [1, N, heads, size].

    On a CPU a single block that is a view is copied: compiled layers would recompile for each kind of view.
    """
    out = outs[0] if len(outs) == 1 and (outs[0].is_cuda or not outs[0]._is_view()) else torch.cat(outs)
    return out[None]


def attend_flash(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, spans: Any, **options: Any
) -> tuple[Tensor, None]:
    """All sequences in one call of the kernel that `spans` (Spans or PackedSequences) is for, without padding."""
    refuse_unsupported(module, options)
    q, k, v = _tokens_first(query, key, value)
    return spans.attend(q, k, v, _scale(q, options), options.get("sliding_window"))[None], None


def attend_flex(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, layout: Layout, **options: Any
) -> tuple[Tensor, None]:
    """One flex_attention call over the packed row, without padding or copies of a prompt's keys."""
    refuse_unsupported(module, options)
    mask = _flex_mask(layout, options.get("sliding_window"))
    run = _compiled_flex() if query.is_cuda else flex_attention
    gqa = query.shape[1] != key.shape[1]
    out = run(query, key, value, block_mask=mask, scale=options.get("scaling"), enable_gqa=gqa)
    return out.transpose(1, 2), None


def _flex_mask(layout: Layout, window: int | None) -> Any:
    if window not in layout.cache:
        group, response, position = layout.group, layout.response, layout.position_ids[0]

        def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            own = (response[key] == -1) | (response[key] == response[query])
            distance = position[query] - position[key]
            seen = (group[query] == group[key]) & own & (distance >= 0)
            return seen if window is None else seen & (distance < window)

        size = len(group)
        layout.cache[window] = create_block_mask(visible, None, None, size, size, device=str(group.device))
    return layout.cache[window]


@cache
def _compiled_flex() -> Any:
    """flex_attention compiled for any length, once per process."""
    return torch.compile(flex_attention, dynamic=True)


def over_ranks(name: str) -> str:
    """The name of the same attention for tokens that several ranks share."""
    return f"{name}_over_ranks"


def _over_ranks(attend: Any) -> Callable[..., tuple[Tensor, None]]:
    """`attend` over all tokens with this rank's heads, from and to its tokens with all heads."""

    def run(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any,
        *, sequence: SequenceRanks, num_tokens: int, **options: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        parts = sequence.to_heads(num_tokens, *_tokens_first(query, key, value))
        out, _ = attend(module, *(x.transpose(0, 1)[None] for x in parts), attention_mask, **options)
        return sequence.to_tokens(out[0])[None], None

    return run


for name, attend in (
    (PADDED["sdpa"], attend_padded),
    (PADDED["eager"], attend_eager),
    (FLEX["sdpa"], attend_flex),
    (FLASH["sdpa"], attend_flash),
):
    AttentionInterface.register(name, attend)
    AttentionInterface.register(over_ranks(name), _over_ranks(attend))
