"""Triton kernels of a decode step on a GPU: attention over KV pages, and the draw of a token with its bookkeeping.

Both read everything that changes from one step to the next (lengths, page tables, keys of random numbers) from device
memory, so that a step can be captured once as a CUDA graph and replayed.
"""

# A kernel is launched as kernel[grid](…), which type checkers report as indexing a function.
# pyright: reportIndexIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 64  # keys that a program processes at a time
DRAW_BLOCK = 1024  # tokens of the vocabulary in one block of the draw
_PROGRAMS = 512  # enough to fill a large GPU; with few rows the keys are split up to this number
_MAX_SPLITS = 16


@triton.jit
def _attend(
    q, k_new, v_new, k_pages, v_pages, table, lengths, out, peaks, sums,
    scale, softcap, window,
    q_row, q_head, k_row, k_head, v_row, v_head, page_stride, slot_stride, head_stride, table_row,
    GROUP: tl.constexpr, GROUP_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr,
    PAGE: tl.constexpr, TILE: tl.constexpr, SPLITS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr,
):  # fmt: skip
    """One row, one key head, one part of its keys: attention of the query heads that share the key head.

    The new token's key and value come from the inputs; the first part starts from them and writes them to their page.
    With SPLITS > 1 `out` holds unnormalised parts, merged by `_merge`.
    """
    row, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    g, d = tl.arange(0, GROUP_PAD), tl.arange(0, SIZE_PAD)
    inside = d < SIZE
    real = (g < GROUP)[:, None] & inside[None, :]
    query = tl.load(q + row * q_row + (head * GROUP + g)[:, None] * q_head + d[None, :], mask=real, other=0.0)
    peak = tl.full([GROUP_PAD], float("-inf"), tl.float32)
    total = tl.zeros([GROUP_PAD], tl.float32)
    mixed = tl.zeros([GROUP_PAD, SIZE_PAD], tl.float32)
    if part == 0:
        key = tl.load(k_new + row * k_row + head * k_head + d, mask=inside, other=0.0)
        value = tl.load(v_new + row * v_row + head * v_head + d, mask=inside, other=0.0)
        page = tl.load(table + row * table_row + length // PAGE).to(tl.int64)
        place = page * page_stride + (length % PAGE) * slot_stride + head * head_stride + d
        tl.store(k_pages + place, key, mask=inside)
        tl.store(v_pages + place, value, mask=inside)
        peak = tl.sum(query.to(tl.float32) * key.to(tl.float32)[None, :], 1) * scale
        if SOFTCAP:
            peak = softcap * (2 * tl.sigmoid(2 * peak / softcap) - 1)
        total += 1.0
        mixed += value.to(tl.float32)[None, :]
    low = 0
    if WINDOW:
        low = tl.maximum(length - window + 1, 0)
    share = tl.cdiv(tl.cdiv(length - low, SPLITS), TILE) * TILE
    begin = low + part * share
    end = tl.minimum(begin + share, length)
    for start in range(begin, end, TILE):
        n = start + tl.arange(0, TILE)
        seen = n < end
        page = tl.load(table + row * table_row + n // PAGE, mask=seen, other=0).to(tl.int64)
        place = page * page_stride + (n % PAGE) * slot_stride + head * head_stride
        both = seen[:, None] & inside[None, :]
        key = tl.load(k_pages + place[:, None] + d[None, :], mask=both, other=0.0)
        scores = tl.dot(query, tl.trans(key), input_precision="ieee") * scale
        if SOFTCAP:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        fade = tl.exp(peak - higher)
        value = tl.load(v_pages + place[:, None] + d[None, :], mask=both, other=0.0)
        total = total * fade + tl.sum(weights, 1)
        mixed = mixed * fade[:, None] + tl.dot(weights.to(value.dtype), value, input_precision="ieee")
        peak = higher
    heads = tl.num_programs(1) * GROUP
    place = row * heads + head * GROUP + g
    if SPLITS == 1:
        mixed = mixed / total[:, None]
        tl.store(out + place[:, None] * SIZE + d[None, :], mixed.to(out.dtype.element_ty), mask=real)
    else:
        place = place * SPLITS + part
        tl.store(out + place[:, None] * SIZE + d[None, :], mixed, mask=real)
        tl.store(peaks + place, peak, mask=g < GROUP)
        tl.store(sums + place, total, mask=g < GROUP)


@triton.jit
def _merge(parts, peaks, sums, out, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, SPLITS: tl.constexpr):
    """Join the parts of one row and query head."""
    place, s, d = tl.program_id(0), tl.arange(0, SPLITS), tl.arange(0, SIZE_PAD)
    inside = (d < SIZE)[None, :]
    peak = tl.load(peaks + place * SPLITS + s)
    weight = tl.exp(peak - tl.max(peak, 0))
    total = tl.sum(tl.load(sums + place * SPLITS + s) * weight, 0)
    mixed = tl.load(parts + (place * SPLITS + s)[:, None] * SIZE + d[None, :], mask=inside, other=0.0)
    merged = tl.sum(mixed * weight[:, None], 0) / total
    tl.store(out + place * SIZE + d, merged.to(out.dtype.element_ty), mask=d < SIZE)


def paged_decode_attention(
    query: Tensor, key: Tensor, value: Tensor, k_pages: Tensor, v_pages: Tensor, table: Tensor, lengths: Tensor, *,
    scale: float, softcap: float = 0.0, window: int = 0,
) -> Tensor:  # fmt: skip
    """Attention [N, heads, size] of one new token per row to its pages and to itself; its key and value are stored.

    `query` is [N, heads, size], `key` and `value` [N, key heads, size], pages [pages, slots, key heads, size]; row i's
    new token is at position lengths[i], in page table[i, lengths[i] // slots]. `window` 0 means no window.
    """
    num_rows, num_heads, size = query.shape
    num_keys, page = key.shape[1], k_pages.shape[1]
    group = num_heads // num_keys
    out = torch.empty(num_rows, num_heads, size, dtype=query.dtype, device=query.device)
    splits = 1
    while splits < _MAX_SPLITS and num_rows * num_keys * splits * 2 <= _PROGRAMS:
        splits *= 2
    if table.shape[1] * page <= TILE:
        splits = 1
    parts, peaks, sums = out, out, out
    if splits > 1:
        parts = torch.empty(num_rows, num_heads, splits, size, dtype=torch.float32, device=query.device)
        peaks, sums = torch.empty(2, num_rows, num_heads, splits, dtype=torch.float32, device=query.device).unbind(0)
    pad = triton.next_power_of_2(size)
    _attend[(num_rows, num_keys, splits)](
        query, key, value, k_pages, v_pages, table, lengths, parts, peaks, sums,
        scale, softcap, window,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        k_pages.stride(0), k_pages.stride(1), k_pages.stride(2), table.stride(0),
        GROUP=group, GROUP_PAD=max(16, triton.next_power_of_2(group)), SIZE=size, SIZE_PAD=max(16, pad),
        PAGE=page, TILE=TILE, SPLITS=splits, SOFTCAP=softcap > 0, WINDOW=window > 0,
        num_warps=2 if size <= 64 else 4, num_stages=2,
    )  # fmt: skip
    if splits > 1:
        _merge[(num_rows * num_heads,)](parts, peaks, sums, out, SIZE=size, SIZE_PAD=max(16, pad), SPLITS=splits)
    return out


@triton.jit
def _summarise(
    logits, cut, peaks, sums, kept, bests, temperature, vocab, stride,
    NUM: tl.constexpr, BLOCK: tl.constexpr, HAS_CUT: tl.constexpr,
):  # fmt: skip
    """For one block of one row: the highest score, the sum of exp(score - highest), and that of tokens above the cut."""
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    v = block * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(logits + row * stride + v, mask=v < vocab, other=float("-inf")).to(tl.float32) / temperature
    peak = tl.max(scores, 0)
    weights = tl.exp(scores - peak)
    place = row * NUM + block
    tl.store(peaks + place, peak)
    tl.store(sums + place, tl.sum(weights, 0))
    tl.store(bests + place, block * BLOCK + tl.argmax(scores, 0))
    if HAS_CUT:
        allowed = scores >= tl.load(cut + row)
        tl.store(kept + place, tl.sum(tl.where(allowed, weights, 0.0), 0))


@triton.jit
def _locate(running, target):
    """First index whose running sum exceeds `target`, never past the last entry that has weight."""
    index = tl.sum((running <= target).to(tl.int32), 0)
    last = tl.sum((running < tl.max(running, 0)).to(tl.int32), 0)
    return tl.minimum(index, last)


@triton.jit
def _uniform(key, position):
    """The same number in [0, 1) as counter_noise.uniform: SplitMix64 of (key, position)."""
    x = key.to(tl.uint64) + position.to(tl.uint64) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _draw(
    logits, cut, peaks, sums, kept, bests, temperature, vocab, stride,
    ints, ints_stride, done, stops, num_stops, tokens, tokens_stride, log_probs,
    NUM: tl.constexpr, NUM_PAD: tl.constexpr, BLOCK: tl.constexpr, STOPS_PAD: tl.constexpr,
    HAS_CUT: tl.constexpr, GREEDY: tl.constexpr,
):  # fmt: skip
    """Choose the token of one row by the inverse of its cumulative sum, and record it in the slot."""
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(ints + ints_stride + row)
    b = tl.arange(0, NUM_PAD)
    block_peaks = tl.load(peaks + row * NUM + b, mask=b < NUM, other=float("-inf"))
    peak = tl.max(block_peaks, 0)
    fade = tl.exp((block_peaks - peak).to(tl.float64))
    total = tl.sum(tl.load(sums + row * NUM + b, mask=b < NUM, other=0.0).to(tl.float64) * fade, 0)
    if GREEDY:
        first = tl.min(tl.where(block_peaks == peak, b, NUM_PAD), 0)
        token = tl.load(bests + row * NUM + first).to(tl.int64)
    else:
        drawn = kept if HAS_CUT else sums
        weights = tl.load(drawn + row * NUM + b, mask=b < NUM, other=0.0).to(tl.float64) * fade
        running = tl.cumsum(weights, 0)
        noise = _uniform(tl.load(ints + 4 * ints_stride + row), length - tl.load(ints + 2 * ints_stride + row))
        target = noise * tl.max(running, 0)
        block = _locate(running, target)
        before = tl.sum(tl.where(b == block - 1, running, 0.0), 0)
        v = block * BLOCK + tl.arange(0, BLOCK)
        scores = tl.load(logits + row * stride + v, mask=v < vocab, other=float("-inf")).to(tl.float32) / temperature
        inside = tl.exp((scores - peak).to(tl.float64))
        if HAS_CUT:
            inside = tl.where(scores >= tl.load(cut + row), inside, 0.0)
        token = (block * BLOCK + _locate(tl.cumsum(inside, 0), target - before)).to(tl.int64)
    score = tl.load(logits + row * stride + token).to(tl.float32) / temperature
    log_prob = (score - peak) - tl.log(total).to(tl.float32)
    s = tl.arange(0, STOPS_PAD)
    stop = tl.load(stops + row * num_stops + s, mask=s < num_stops, other=-1)
    ends = (tl.max((stop == token).to(tl.int32), 0) > 0) | (length >= tl.load(ints + 3 * ints_stride + row))
    if tl.load(done + row) == 0:
        tl.store(tokens + row * tokens_stride + length, token)
        tl.store(log_probs + row * tokens_stride + length, log_prob)
        tl.store(ints + row, token)
        tl.store(ints + ints_stride + row, length + 1)
        tl.store(done + row, ends.to(tl.int8))


def draw_tokens(logits: Tensor, slots: Any, *, temperature: float, greedy: bool, cut: Tensor | None = None) -> None:
    """Draw the next token of the first N rows of `slots` from logits [N, V] and record it, as `Slots.record` would.

    `cut` [N, 1] is the lowest score (logits / temperature) that may be drawn. A row that is done does not advance.
    """
    num_rows, vocab = logits.shape
    num = triton.cdiv(vocab, DRAW_BLOCK)
    numbers = torch.empty(3, num_rows, num, dtype=torch.float32, device=logits.device)
    bests = torch.empty(num_rows, num, dtype=torch.int32, device=logits.device)
    peaks, sums, kept = numbers.unbind(0)
    limits = peaks if cut is None else cut
    shared = (logits, limits, peaks, sums, kept, bests, temperature, vocab, logits.stride(0))
    _summarise[(num_rows, num)](*shared, NUM=num, BLOCK=DRAW_BLOCK, HAS_CUT=cut is not None)
    _draw[(num_rows,)](
        *shared,
        slots.ints, slots.ints.stride(0), slots.done.view(torch.int8), slots.stops, slots.stops.shape[1],
        slots.tokens, slots.tokens.stride(0), slots.log_probs,
        NUM=num, NUM_PAD=triton.next_power_of_2(num), BLOCK=DRAW_BLOCK,
        STOPS_PAD=triton.next_power_of_2(slots.stops.shape[1]), HAS_CUT=cut is not None, GREEDY=greedy,
    )  # fmt: skip
