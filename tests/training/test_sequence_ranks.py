"""Ranks that share sequences: parts of the tokens, and what is refused. Values are compared in tests/distributed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

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
