"""How a mini-batch is divided among ranks: every row once, evenly, with groups whole where that pays."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.metrics import Metric
from gspo.training.batch.batching import plan_micro_batches
from gspo.training.parallel.ranks import Ranks, idle_row, merge_ranks, split_over_ranks, spread
from gspo.types import BatchTotals, TrainBatch


def batch_of(shape: list[tuple[int, list[int]]]) -> TrainBatch:
    """Groups of (prompt tokens, tokens of each answer)."""
    prompts, answers, groups = [], [], []
    for i, (size, lengths) in enumerate(shape):
        for length in lengths:
            prompts.append((1,) * size)
            answers.append((2,) * length)
            groups.append(i)
    mask = torch.zeros(len(answers), max(len(a) for a in answers))
    return TrainBatch(prompts, answers, mask, torch.tensor(groups), mask[:, 0], mask)


def place(rank: int, size: int) -> Ranks:
    ranks = Ranks()
    ranks.rank, ranks.size = rank, size
    return ranks


SHAPES = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 12), min_size=1, max_size=5)), min_size=1, max_size=7
)


@given(shape=SHAPES, num=st.integers(1, 5), kind=st.sampled_from(["plain", "packed", "shared"]), by_rows=st.booleans())
def test_all_ranks_together_run_every_row_once_in_as_many_micro_batches(shape, num, kind, by_rows):
    batch = batch_of(shape)
    budget = None if by_rows else 40
    plans = [
        plan_micro_batches(batch, 3, max_tokens=budget, max_rows=2, kind=kind, ranks=place(rank, num))
        for rank in range(num)
    ]
    alone = plan_micro_batches(batch, 3, max_tokens=budget, max_rows=2, kind=kind)
    for index, whole in enumerate(alone):
        of_ranks = [plan[index] for plan in plans]
        assert len({len(micros) for micros in of_ranks}) == 1
        rows = sorted(row for micros in of_ranks for micro in micros for row in micro)
        assert rows == sorted(row for micro in whole for row in micro)
    if num == 1:
        assert plans[0] == alone


def test_a_shared_prompt_counts_once_where_its_group_is_whole():
    """Tokens to run: 10 + 8, 10 + 8, 1 + 1. Counted for every row, the first group would be the largest by far."""
    batch = batch_of([(10, [1] * 8), (10, [8]), (1, [1])])
    shares = split_over_ranks(batch, list(range(10)), 2, share_prompts=True)
    assert shares == [[*range(8), 9], [8]]


def test_every_context_of_a_group_counts():
    """Three rows of one group with contexts of their own, and one of another: no prompt is shared, all rows cost the same."""
    batch = batch_of([(10, [1] * 3), (10, [1])])
    contexts = [(row,) * 10 for row in range(4)]
    batch = dataclasses.replace(batch, prompt_ids=contexts)
    assert split_over_ranks(batch, list(range(4)), 2, share_prompts=True) == [[0, 2], [1, 3]]


@given(shape=SHAPES, num=st.integers(2, 4))
def test_no_rank_has_more_than_its_share_and_one_row(shape, num):
    batch = batch_of(shape)
    rows = list(range(batch.num_sequences))
    costs = [len(p) + len(r) for p, r in zip(batch.prompt_ids, batch.response_ids)]
    parts = split_over_ranks(batch, rows, num, share_prompts=False)
    assert max(sum(costs[row] for row in part) for part in parts) <= sum(costs) / num + max(costs)


def test_groups_stay_whole_where_prompts_are_long_and_are_divided_where_one_would_wait():
    long = batch_of([(100, [5, 5]), (100, [5, 5])])
    assert split_over_ranks(long, [0, 1, 2, 3], 2, share_prompts=True) == [[0, 1], [2, 3]]
    single = batch_of([(2, [50, 50, 50, 50])])
    parts = split_over_ranks(single, [0, 1, 2, 3], 2, share_prompts=True)
    assert sorted(len(part) for part in parts) == [2, 2]


def test_the_idle_row_is_the_shortest():
    assert idle_row(batch_of([(4, [3, 1]), (1, [3])])) == 2


def test_counts_of_rows_add_up_and_what_all_ranks_know_counts_once():
    one = {"actor/pg_loss": Metric.mean(1.0, 0.25), "actor/grad_norm": Metric.mean(2.0), "a/max": Metric("max", 1.0)}
    one |= {"actor/skipped_updates": Metric("sum", 1.0), "actor/lr": Metric("last", 0.1)}
    two = one | {"actor/pg_loss": Metric.mean(3.0, 0.75), "a/max": Metric("max", 4.0)}
    merged = {name: metric.result() for name, metric in merge_ranks([one, two]).items()}
    assert merged == {
        "actor/pg_loss": pytest.approx(4.0),
        "actor/grad_norm": 2.0,
        "a/max": 4.0,
        "actor/skipped_updates": 1.0,
        "actor/lr": 0.1,
    }


def test_numbers_that_every_rank_has_are_those_of_the_first():
    names = ("skipped_updates", "nonfinite_loss", "nonfinite_gradient", "grad_norm", "lr", "vf_explained_var")
    metrics = {f"{role}/{name}": Metric("sum", 2.0) for name in names for role in ("actor", "critic")}
    assert {m.result() for m in merge_ranks([metrics, dict(metrics), dict(metrics)]).values()} == {2.0}
    others = {"actor/lr/mb0": Metric("sum", 2.0), "only": Metric("sum", 1.0)}
    merged = merge_ranks([metrics, others, others])
    assert (merged["actor/lr/mb0"].result(), merged["only"].result()) == (4.0, 2.0)


def test_a_batch_without_rows_for_a_rank_leaves_it_idle():
    batch = batch_of([(3, [4])])
    plans = [
        plan_micro_batches(batch, 1, max_tokens=40, max_rows=1, kind="shared", ranks=place(rank, 3))
        for rank in range(3)
    ]
    assert sorted(plan[0] for plan in plans) == [[[]], [[]], [[0]]]


def test_totals_of_a_mini_batch_are_summed_over_ranks():
    class Two(Ranks):
        size = 2

        def sum(self, values):
            return values + torch.tensor([10.0, 3.0], dtype=values.dtype)  # those of the other rank

    assert Two().total(BatchTotals(7.0, 2.0)) == BatchTotals(17.0, 5.0)
    assert Ranks().total(BatchTotals(7.0, 2.0)) == BatchTotals(7.0, 2.0)


def test_ranks_of_one_sequence_have_one_share():
    class Paired(Ranks):
        size, ranks_per_sequence = 6, 2

        def sum(self, values):
            return 3 * values

    found = [Paired() for _ in range(6)]
    for rank, each in enumerate(found):
        each.rank = rank
    assert [each.share for each in found] == [0, 0, 1, 1, 2, 2] and found[0].num_shares == 3
    assert found[0].total(BatchTotals(7.0, 2.0)) == BatchTotals(21.0, 6.0)
    found[0].size = 2  # both ranks run all rows: there is nothing to add
    assert found[0].num_shares == 1 and found[0].total(BatchTotals(7.0, 2.0)) == BatchTotals(7.0, 2.0)
    assert (Ranks().num_shares, Ranks().share, Ranks().ranks_per_sequence) == (1, 0, 1)


def test_items_go_to_the_bin_with_the_least_cost_the_most_expensive_first():
    assert spread([1, 5, 2, 4], 2) == [[0, 1], [2, 3]]
    assert spread([3, 3, 3], 2) == [[0, 2], [1]]  # the first bin of equals
    assert spread([], 2) == [[], []] and spread([7], 2) == [[0], []]


def test_shares_cover_the_given_rows_only_and_count_prompts_of_each_group_they_touch():
    batch = batch_of([(10, [1, 1]), (1, [30]), (10, [1, 1])])
    assert split_over_ranks(batch, [4, 2, 0], 1, share_prompts=True) == [[4, 2, 0]]
    assert split_over_ranks(batch, [0, 1, 3, 4], 2, share_prompts=True) == [[0, 1], [3, 4]]
    assert split_over_ranks(batch, [0, 1, 2, 3, 4], 2, share_prompts=True) == [[2], [0, 1, 3, 4]]
    assert split_over_ranks(batch, [0, 1, 2], 2, share_prompts=False) == [[2], [0, 1]]
