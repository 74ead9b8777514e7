"""The flash path of packed training, as far as a CPU shows it: what its spans say, and how graphs pad."""

from __future__ import annotations

import pytest
import torch

from gspo.training.batching import collate
from gspo.training.flash import Spans
from gspo.training.graphed import _bucket, _pad, _round_up
from gspo.training.packed_attention import attend_padded
from gspo.training.packing import pack

from .test_policy import groups


def attend_by_spans(q, k, v, spans: Spans, scale: float, window: int | None):
    """What the kernel computes, sequence by sequence: [N, heads, size], zero after the last sequence."""
    out = torch.zeros_like(q)
    repeat = q.shape[1] // k.shape[1]
    for i in range(len(spans.query_starts) - 1):
        queries = slice(*spans.query_starts[i : i + 2].tolist())
        keys = spans.keys[slice(*spans.key_starts[i : i + 2].tolist())]
        num, seen = queries.stop - queries.start, len(keys)
        if not num:
            continue
        own_k, own_v = (x[keys].repeat_interleave(repeat, dim=1) for x in (k, v))
        distance = (torch.arange(num)[:, None] + seen - num) - torch.arange(seen)
        hidden = (distance < 0) | (distance >= (window or seen + 1))
        scores = torch.einsum("qhd,khd->hqk", q[queries], own_k) * scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out[queries] = torch.einsum("hqk,khd->qhd", weights, own_v)
    return out


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("window", [None, 5])
def test_spans_say_what_the_layouts_blocks_say(share, window):
    batch = collate(groups(num=4))
    rows = list(range(batch.num_sequences))
    _, layout, targets, slots = pack(batch, rows, "cpu", share=share)
    ids, flash, *same = pack(batch, rows, "cpu", share=share, flash=True)
    assert flash.spans is not None and torch.equal(same[0], targets) and torch.equal(same[1], slots)
    num, generator = ids.shape[1], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(num, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    packed = [x.transpose(0, 1)[None] for x in (q, k, v)]
    module = torch.nn.Identity()
    expected, _ = attend_padded(module, *packed, None, layout=layout, scaling=0.3, sliding_window=window)
    assert torch.allclose(attend_by_spans(q, k, v, flash.spans, 0.3, window), expected[0], atol=1e-12)


def test_padding_to_a_bucket_changes_nothing_that_is_read():
    batch = collate(groups(num=3))
    ids, layout, _, _ = pack(batch, list(range(batch.num_sequences)), "cpu", share=True, flash=True)
    assert layout.spans is not None
    key = _bucket(ids.shape[1], layout.spans)
    padded_ids, positions, *starts, keys = _pad(key, ids, layout.position_ids, layout.spans)
    assert padded_ids.shape == positions.shape == (1, key[0])
    assert [len(s) for s in starts] == [key[1]] * 2 and len(keys) == key[2]
    num, generator = ids.shape[1], torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(key[0], 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
    wide = Spans(starts[0], starts[1], keys, torch.tensor(key[-2:]))
    out = attend_by_spans(q, k, v, wide, 0.5, None)
    alone = attend_by_spans(q[:num], k[:num], v[:num], layout.spans, 0.5, None)
    assert torch.equal(out[:num], alone) and not out[num:].any()
    assert (layout.spans.longest <= wide.longest).all()


@pytest.mark.parametrize("number", [1, 2, 3, 7, 8, 9, 100, 1000, 4097, 16384, 20000])
@pytest.mark.parametrize("steps", [1, 8])
def test_a_bucket_holds_its_number_and_little_more(number, steps):
    size = _round_up(number, steps)
    assert number <= size <= max(2 * number, 1) if steps == 1 else number <= size <= number * 1.125 + 1
    assert _round_up(size, steps) == size
