"""The flash path of packed training, as far as a CPU shows it: what its spans say, and how graphs pad."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gspo.kernels.flash_packed import Spans
from gspo.training.batch.attention import attend_padded
from gspo.training.batch.batching import collate
from gspo.training.batch.packing import pack
from gspo.training.cuda_graphs import MAX_GRAPHS, MAX_PADDING, GraphedDecoder, _pad, _rounded, _size
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


def test_padding_to_a_bucket_changes_nothing_that_is_read():
    batch = collate(groups(num=3))
    ids, layout, _, _ = pack(batch, list(range(batch.num_sequences)), "cpu", share=True, spans_of=Spans.of)
    assert layout.spans is not None
    key = _rounded(_size(ids.shape[1], layout.spans), varies=False)
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


@pytest.mark.parametrize("number", [1, 2, 63, 64, 65, 1000, 4097, 16384, 20000])
@pytest.mark.parametrize("varies", [False, True])
def test_a_graph_holds_its_size_and_little_more(number, varies):
    size = (number, 5, 2 * number, 30, 70)
    rounded = _rounded(size, varies=varies)
    assert all(have >= need for have, need in zip(rounded, size))
    assert rounded[0] <= max(number + 63, number * (MAX_PADDING if varies else 1))


class Sizes(torch.nn.Module):
    """A decoder that notes how many tokens it was given, and `captures` of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, input_ids, position_ids, use_cache, spans):
        self.seen.append(input_ids.shape[1])
        return SimpleNamespace(last_hidden_state=input_ids[..., None].float())


def graphed(monkeypatch) -> tuple[GraphedDecoder, Sizes]:
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda module, sample, **_: module)
    decoder = Sizes()
    return GraphedDecoder(decoder), decoder


def run(graphs: GraphedDecoder, num: int) -> None:
    ids = torch.arange(num)[None]
    out = graphs.hidden(ids, ids, Spans.of([(0, num, 0, 0)], "cpu"))
    assert torch.equal(out[:, 0], ids[0].float())


def test_batches_of_one_size_are_hardly_padded_and_others_share_graphs(monkeypatch):
    graphs, decoder = graphed(monkeypatch)
    for num in (8384, 8384):
        run(graphs, num)
    assert decoder.seen == [8384, 8384]
    sizes = torch.randint(8000, 16000, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    for num in sizes:
        run(graphs, num)
    assert all(used <= MAX_PADDING * num or used == num for used, num in zip(decoder.seen[2:], sizes))
    assert len(graphs._graphs) <= MAX_GRAPHS
    without = sum(used == num and used % 64 != 0 for used, num in zip(decoder.seen[2:], sizes))
    assert without < 30, "graphs of few sizes take nearly all micro-batches"


def test_a_size_keeps_its_graph_when_one_that_fits_better_comes(monkeypatch):
    graphs, decoder = graphed(monkeypatch)
    run(graphs, 1088)
    run(graphs, 1000)  # takes that of 1088
    graphs._chosen.pop(next(s for s in graphs._chosen if s[0] == 1088))
    graphs._graphs[(1024, 2, 4096, 2048, 2048)] = graphs._graphs[next(iter(graphs._graphs))]
    run(graphs, 1000)
    assert decoder.seen == [1088, 1088, 1088]
    run(graphs, 1001)
    assert decoder.seen[-1] == 1024
