"""Ranks that share sequences: parts of the tokens, and what is refused. Values are compared in tests/distributed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gspo.training.batch.batching import micro_batch, plan_micro_batches
from gspo.training.forward import Forward
from gspo.training.parallel import ShardError
from gspo.training.parallel.ranks import Ranks
from gspo.training.parallel.sequence import SequenceRanks
from tests.training.models import llama
from tests.training.test_ranks import SHAPES, batch_of


def ranks_of(size: int) -> list[SequenceRanks]:
    return [SequenceRanks(rank, size, None) for rank in range(size)]


@given(num_tokens=st.integers(0, 30), size=st.integers(1, 6))
def test_parts_are_neighbours_of_about_equal_size(num_tokens, size):
    parts = [list(range(*r.bounds(num_tokens))) for r in ranks_of(size)]
    assert [token for part in parts for token in part] == list(range(num_tokens))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(shape=SHAPES, size=st.integers(2, 4), kind=st.sampled_from(["packed", "shared"]))
def test_every_prediction_is_made_on_one_rank_from_its_own_token(shape, size, kind):
    batch = batch_of(shape)
    batch.mask.fill_(1.0)
    rows = list(range(batch.num_sequences))
    whole = micro_batch(batch, rows, "cpu", kind)
    states = torch.arange(whole.input_ids.shape[1], dtype=torch.float32)[:, None]
    predicting = dict(zip(whole.slots.tolist(), whole.layout.predicting(states)[:, 0].tolist()))
    found: dict[int, float] = {}
    for ranks in ranks_of(size):
        part = micro_batch(batch, rows, "cpu", kind, sequence=ranks)
        own = part.layout.predicting(states[part.layout.part])[:, 0].tolist()
        assert found.keys().isdisjoint(part.slots.tolist())
        found |= dict(zip(part.slots.tolist(), own))
    assert found == predicting


def test_ranks_of_a_sequence_run_the_same_rows_with_tokens_for_each():
    batch = batch_of([(3, [5, 5]), (3, [5, 5]), (3, [5, 5]), (3, [5, 5])])
    plans = []
    for rank in range(4):
        ranks = Ranks()
        ranks.rank, ranks.size, ranks.sequence = rank, 4, SequenceRanks(rank % 2, 2, None)
        plans.append(plan_micro_batches(batch, 4, max_tokens=11, max_rows=1, kind="shared", ranks=ranks))
    assert plans[0] == plans[1] and plans[2] == plans[3] and plans[0] != plans[2]
    assert [len(micros) for plan in plans for micros in plan] == [1, 1, 1, 1]  # 22 tokens for two ranks


def test_what_cannot_be_shared_is_refused_by_name(monkeypatch):
    with pytest.raises(ShardError, match="ulysses_sequence_parallel_size=3: LlamaForCausalLM has 4 attention heads"):
        SequenceRanks(0, 3, None).check(llama())
    SequenceRanks(0, 4, None).check(llama())  # two key heads, each for two ranks
    with pytest.raises(ShardError, match=r"needs packed rows.*use_remove_padding=false"):
        Forward.of(llama().base_model, "plain", sequence=SequenceRanks(0, 2, None))
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    with pytest.raises(ShardError, match="=2 does not divide the 3 trainer ranks"):
        SequenceRanks.of(2)


class Exchange:
    """All-to-all and all-reduce between threads, each of which is a rank."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=20)
        self.sent: dict[int, list[Tensor]] = {}
        self.place = threading.local()

    def all_to_all_single(self, out: Tensor, x: Tensor, received: list[int], sent: list[int], group: object) -> None:
        self.sent[self.place.rank] = list(x.detach().split(sent))
        self.barrier.wait()
        parts = [self.sent[rank][self.place.rank] for rank in range(self.barrier.parties)]
        assert [len(part) for part in parts] == received
        out.copy_(torch.cat(parts))
        self.barrier.wait()

    def all_reduce(self, values: Tensor, group: object) -> None:
        self.sent[self.place.rank] = [values.clone()]
        self.barrier.wait()
        total = sum(self.sent[rank][0] for rank in range(self.barrier.parties))
        self.barrier.wait()
        values.copy_(total)

    def run(self, of_rank: Callable[[int], object]) -> list[Any]:
        """What `of_rank` gives on each rank, in their order."""

        def start(rank: int) -> object:
            self.place.rank = rank
            return of_rank(rank)

        with ThreadPoolExecutor(self.barrier.parties) as pool:
            return list(pool.map(start, range(self.barrier.parties)))


@pytest.fixture
def exchange(monkeypatch) -> Callable[[int], Exchange]:
    def make(size: int) -> Exchange:
        made = Exchange(size)
        monkeypatch.setattr(dist, "all_to_all_single", made.all_to_all_single)
        monkeypatch.setattr(dist, "all_reduce", made.all_reduce)
        return made

    return make


@pytest.mark.parametrize(("size", "num_tokens"), [(2, 5), (4, 6), (4, 3), (2, 1)])
def test_tokens_are_exchanged_for_heads_and_back_with_their_gradients(exchange, size, num_tokens):
    """4 query heads and 2 key heads; with 4 ranks a key head serves two of them, with few tokens a rank has none."""
    drawn = torch.Generator().manual_seed(0)
    query, key = (torch.randn(num_tokens, heads, 3, generator=drawn, dtype=torch.float64) for heads in (4, 2))
    weights = torch.randn(num_tokens, 4, 3, generator=drawn, dtype=torch.float64)
    ranks = ranks_of(size)

    def of_rank(rank: int) -> tuple[Tensor, ...]:
        own = ranks[rank].part(num_tokens)
        q, k = (x[own].clone().requires_grad_() for x in (query, key))
        all_q, all_k = ranks[rank].to_heads(num_tokens, q, k)
        back = ranks[rank].to_tokens(all_q * all_k.sum())
        grads = torch.autograd.grad((back * weights[own]).sum() if len(range(num_tokens)[own]) else back.sum(), (q, k))
        return all_q.detach(), all_k.detach(), back.detach(), *grads

    for rank, (all_q, all_k, back, q_grad, _) in enumerate(exchange(size).run(of_rank)):
        heads = slice(rank * 4 // size, (rank + 1) * 4 // size)
        key_heads = slice(rank * 2 // size, max(rank * 2 // size + 1, (rank + 1) * 2 // size))
        assert torch.equal(all_q, query[:, heads]) and torch.equal(all_k, key[:, key_heads])
        start, end = ranks[rank].bounds(num_tokens)
        scale = torch.stack([key[:, head // 2].sum() for head in range(4)])[:, None]
        torch.testing.assert_close(back[: end - start], query[start:end] * scale)
        torch.testing.assert_close(q_grad[: end - start], weights[start:end] * scale)
        assert len(back) == max(1, end - start)
        if end == start:
            assert not back.any() and not q_grad.any()


def test_values_of_all_parts_are_added_up_and_each_keeps_its_own_gradient(exchange):
    parts = [torch.tensor([1.0, 0.0]), torch.tensor([0.0, 5.0])]

    def of_rank(rank: int) -> tuple[Tensor, Tensor]:
        own = parts[rank].clone().requires_grad_()
        total = ranks_of(2)[rank].add_up(own)
        return total.detach(), torch.autograd.grad((total * torch.tensor([2.0, 3.0])).sum(), own)[0]

    for total, grad in exchange(2).run(of_rank):
        assert total.tolist() == [1.0, 5.0] and grad.tolist() == [2.0, 3.0]
    assert [part.tolist() for part in parts] == [[1.0, 0.0], [0.0, 5.0]]


@pytest.mark.parametrize(
    ("heads", "key_heads", "sizes"), [(4, 2, {1, 2, 4}), (6, 3, {1, 3, 6}), (4, None, {1, 2, 4}), (8, 3, {1})]
)
def test_heads_are_shared_where_every_rank_gets_as_many(heads, key_heads, sizes):
    config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_heads)
    model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: config))
    for size in range(1, 9):
        if size in sizes:
            SequenceRanks(0, size, None).check(model)
        else:
            with pytest.raises(ShardError, match=f"parallel_size={size}: .* use a divisor of {heads}"):
                SequenceRanks(0, size, None).check(model)
