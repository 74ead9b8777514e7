"""The spans of the flash kernel describe the same attention as the blocks of a layout; the kernel itself needs a GPU."""

from __future__ import annotations

import pytest
import torch

from gspo.kernels.flash_packed import Spans
from gspo.training.batch.attention import attend_padded
from gspo.training.batch.batching import collate
from gspo.training.batch.packing import pack
from tests.training.test_policy import groups


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
    ids, flash, *same = pack(batch, rows, "cpu", share=share, spans_of=Spans.of)
    assert flash.spans is not None and torch.equal(same[0], targets) and torch.equal(same[1], slots)
    num, generator = ids.shape[1], torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(num, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    packed = [x.transpose(0, 1)[None] for x in (q, k, v)]
    module = torch.nn.Identity()
    expected, _ = attend_padded(module, *packed, None, layout=layout, scaling=0.3, sliding_window=window)
    assert torch.allclose(attend_by_spans(q, k, v, flash.spans, 0.3, window), expected[0], atol=1e-12)
