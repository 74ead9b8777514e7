"""Which sizes are captured as CUDA graphs, and that padding to them changes nothing that is read.

Capturing needs a GPU; here a captured module is the module itself.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from gspo.kernels.flash_packed import Spans
from gspo.training.batch.batching import collate
from gspo.training.batch.packing import pack
from gspo.training.cuda_graphs import MAX_GRAPHS, MAX_PADDING, GraphedDecoder
from tests.kernels.test_flash_packed import attend_by_spans
from tests.training.test_policy import groups


class Decoder(torch.nn.Module):
    """Attention over embedded tokens, without layers; `seen` lists the sizes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self._table = torch.randn(3, 1 << 14, 2, 4, generator=generator, dtype=torch.float64)
        self.seen: list[int] = []
        self.attends = True

    def forward(self, input_ids, position_ids, use_cache, spans):
        assert input_ids.shape == position_ids.shape
        self.seen.append(input_ids.shape[1])
        if not self.attends:
            return SimpleNamespace(last_hidden_state=input_ids[..., None].double())
        q, k, v = self._table[:, input_ids[0]]
        return SimpleNamespace(last_hidden_state=attend_by_spans(q, k, v, spans, 0.5, None)[None])


class Captures:
    """A GraphedDecoder over `decoder` and how many graphs it captured."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num, self.decoder = 0, Decoder()
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        monkeypatch.setattr(torch.cuda, "make_graphed_callables", self._capture)
        self.graphs = GraphedDecoder(self.decoder)

    def _capture(self, module, sample, **options):
        self.num += 1
        return module

    def run(self, *lengths: int) -> int:
        """Run sequences of these lengths; how many tokens the decoder got."""
        self.decoder.attends = False
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        ids = torch.arange(sum(lengths))[None]
        spans = Spans.of([(start, num, 0, 0) for start, num in zip(starts, lengths)], "cpu")
        out = self.graphs.hidden(ids, ids, spans)
        assert torch.equal(out[:, 0], ids[0].double())
        return self.decoder.seen[-1]


@pytest.fixture
def captures(monkeypatch):
    return Captures(monkeypatch)


def test_padding_changes_nothing_that_is_read(captures):
    batch = collate(groups(num=3))
    ids, layout, _, _ = pack(batch, list(range(batch.num_sequences)), "cpu", share=True, spans_of=Spans.of)
    assert layout.spans is not None
    out = captures.graphs.hidden(ids, layout.position_ids, layout.spans)
    plain = captures.decoder(ids, layout.position_ids, False, layout.spans).last_hidden_state[0]
    padded, alone = captures.decoder.seen
    assert padded > alone == ids.shape[1] and torch.equal(out, plain)


@pytest.mark.parametrize("number", [1, 2, 63, 64, 65, 1000, 4097, 12000])
def test_a_graph_holds_its_size_and_little_more(captures, number):
    assert number <= captures.run(number) <= number + 63
    more = number + max(1, number // 20)
    assert more <= captures.run(more) <= max(more + 63, MAX_PADDING * more)


def test_batches_of_one_size_are_hardly_padded_and_others_share_graphs(captures):
    assert [captures.run(8384), captures.run(8384)] == [8384, 8384]
    sizes = torch.randint(8000, 16000, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    used = [captures.run(num) for num in sizes]
    assert all(have <= MAX_PADDING * num or have == num for have, num in zip(used, sizes))
    assert captures.num <= MAX_GRAPHS
    without = sum(have == num and have % 64 != 0 for have, num in zip(used, sizes))
    assert without < 30, "graphs of few sizes serve nearly all micro-batches"


def test_a_size_keeps_its_graph_when_one_that_fits_better_comes(captures):
    assert [captures.run(1088), captures.run(1000)] == [1088, 1088]
    assert captures.run(1, 1008, 1) == 1024, "more sequences than the first graph holds"
    assert [captures.run(1000), captures.run(1001)] == [1088, 1024] and captures.num == 2
