"""From groups to tensors: every field of a batch, mini-batches of whole groups, and micro-batches within their budget."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gspo.training.batch.batching import (
    balance,
    collate,
    count_rows,
    micro_batch,
    mini_batches,
    plan_micro_batches,
    split_by_rows,
    split_by_tokens,
    split_packed,
)
from gspo.training.parallel.ranks import Ranks
from gspo.types import BatchTotals, Group, Prompt, Reward, Rollout, Turn


def rollout(size: int, mask: tuple[int, ...], score: float) -> Rollout:
    reward = Reward(score, kl_penalty=0.5)
    log_probs = tuple(-0.1 * (i + 1) for i in range(size))
    return Rollout(tuple(range(10, 10 + size)), log_probs, mask, (0,) * size, "stop", reward=reward)


def two_groups() -> list[Group]:
    first = (rollout(3, (0, 1, 1), 1.0), rollout(1, (1,), 0.0))
    second = (rollout(2, (1, 0), 2.0),)
    return [Group(Prompt("a", (), (1, 2)), first, 7, 0), Group(Prompt("b", (), (3, 4, 5)), second, 8, 0)]


def test_every_field_of_a_batch():
    batch = collate(two_groups(), order_seed=9)
    assert batch.prompt_ids == [(1, 2), (1, 2), (3, 4, 5)]
    assert batch.response_ids == [(10, 11, 12), (10,), (10, 11)]
    assert batch.mask.tolist() == [[0, 1, 1], [1, 0, 0], [1, 0, 0]]
    assert batch.group_ids.tolist() == [0, 0, 1]
    assert batch.scores.tolist() == [0.5, -0.5, 1.5]  # after the KL penalty
    wanted = torch.tensor([[-0.1, -0.2, -0.3], [-0.1, 0, 0], [-0.1, -0.2, 0]])
    torch.testing.assert_close(batch.rollout_log_probs, wanted)
    assert (batch.num_sequences, batch.order_seed) == (3, 9)


def test_mini_batches_are_whole_groups_and_the_last_may_be_smaller():
    groups = torch.tensor([0, 0, 1, 2, 2, 2, 3, 4])
    assert mini_batches(groups, 2) == [[0, 1, 2], [3, 4, 5, 6], [7]]
    assert mini_batches(groups, 2, order=[4, 0, 3, 1, 2]) == [[0, 1, 7], [2, 6], [3, 4, 5]]
    assert mini_batches(groups, 9) == [list(range(8))]


def test_padded_positions_predict_the_token_after_them():
    """The hidden state at position p predicts token p + 1. Tokens that are not trained on (mask 0) are not predicted."""
    micro = micro_batch(collate(two_groups()), [0, 2], "cpu")
    assert micro.input_ids.tolist() == [[1, 2, 10, 11, 12], [3, 4, 5, 10, 11]]
    assert micro.positions.tolist() == [2, 3, 5 + 2]
    assert micro.targets.tolist() == [11, 12, 10]
    flat = micro.input_ids.flatten()
    assert flat[micro.positions + 1].tolist() == micro.targets.tolist()
    values = torch.arange(1.0, 4.0)
    assert micro.scatter(values).tolist() == [[0, 1, 2], [3, 0, 0]]


def test_budgets_are_kept_to_the_token():
    lengths = [5, 5, 5, 5, 11]
    assert split_by_tokens(lengths, range(5), 10) == [[4], [0, 1], [2, 3]]  # a row above the budget is alone
    assert split_by_tokens(lengths, [0, 1, 2], 15) == [[0, 1, 2]]
    assert split_by_tokens(lengths, [0, 1, 2], 14) == [[0, 1], [2]]
    assert split_by_rows([3, 1, 2], 2) == [[3, 1], [2]]
    assert sorted(map(sorted, balance([4, 3, 3, 2], 6))) == [[0, 3], [1, 2]]
    assert all(sum([9, 5, 5, 5][i] for i in part) <= 10 or len(part) == 1 for part in balance([9, 5, 5, 5], 10))
    assert len(balance([9, 5, 5, 5], 10)) == 3


@pytest.mark.parametrize("kind", ["packed", "shared"])
@pytest.mark.parametrize("budget", [4, 6, 9, 40])
def test_packed_micro_batches_hold_each_row_once_and_keep_their_budget(kind, budget):
    groups = [
        Group(Prompt(str(i), (), (1,) * (1 + i)), tuple(rollout(n, (1,) * n, 1.0) for n in (2, 4, 1)), i, 0)
        for i in range(3)
    ]
    batch = collate(groups)
    parts = split_packed(batch, range(9), budget, kind)
    assert sorted(row for part in parts for row in part) == list(range(9))
    for part in parts:
        prompts = {int(batch.group_ids[row]): len(batch.prompt_ids[row]) for row in part}
        shared = sum(prompts.values()) if kind == "shared" else sum(len(batch.prompt_ids[row]) for row in part)
        tokens = shared + sum(len(batch.response_ids[row]) - 1 for row in part)
        assert tokens <= budget or len(part) == 1
    if budget == 40:
        assert len(parts) == 1


@pytest.mark.parametrize("budget", [13, 20, 25])
def test_each_different_context_of_a_group_counts_in_the_budget(budget):
    """Two rollouts of one prompt and three branches: two with one context, one with another. 2 + 10 + 12 tokens and answers."""
    contexts = [(7,) * 10, (7,) * 10, (8,) * 12]
    branches = [dataclasses.replace(rollout(2, (1, 1), 1.0), context=context) for context in contexts]
    rollouts = (dataclasses.replace(rollout(3, (1,) * 3, 1.0), branches=tuple(branches)), rollout(3, (1,) * 3, 0.0))
    batch = collate([Group(Prompt("a", (), (1, 2)), rollouts, 0, 0)])
    parts = split_packed(batch, range(5), budget, "shared")
    assert sorted(row for part in parts for row in part) == list(range(5))
    sizes = [micro_batch(batch, part, "cpu", "shared").input_ids.numel() for part in parts]
    assert max(sizes) <= budget and sum(sizes) == 2 + 10 + 12 + 2 * 2 + 3 * 1  # every context once


def test_a_plan_holds_every_row_of_every_mini_batch_once():
    batch = collate([g for _ in range(2) for g in two_groups()])
    for how in ({"max_tokens": 5, "max_rows": 1}, {"max_tokens": None, "max_rows": 2}):
        for kind in ("plain", "packed", "shared"):
            plan = plan_micro_batches(batch, 3, kind=kind, **how)
            assert [sorted(row for part in parts for row in part) for parts in plan] == [[0, 1, 2, 3, 4], [5]]
    by_rows = plan_micro_batches(batch, 4, max_tokens=None, max_rows=4)
    assert by_rows == [[[0, 1, 2, 3], [4, 5]]]


def test_a_response_that_was_cut_is_not_trained_on_where_the_config_says_so():
    whole = Rollout((1, 2, 3), (-1.0,) * 3, (1, 0, 1), (0,) * 3, "stop", reward=Reward(1.0))
    cut = Rollout((4, 5), (-1.0,) * 2, (1, 1), (0,) * 2, "length", reward=Reward(0.0))
    group = Group(Prompt("p", (), (9,)), (whole, cut), 0, 0)
    assert collate([group]).mask.tolist() == [[1, 0, 1], [1, 1, 0]]
    masked = collate([group], mask_truncated=True)
    assert masked.mask.tolist() == [[1, 0, 1], [0, 0, 0]]
    assert masked.scores.tolist() == [1.0, 0.0]  # its reward still counts in the group's mean


def test_branches_of_a_response_that_was_cut_are_not_trained_on_either():
    branch = Rollout((7, 8), (-1.0,) * 2, (1, 1), (0,) * 2, "stop", context=(5, 6))
    cut = Rollout((4, 5), (-1.0,) * 2, (1, 1), (0,) * 2, "length", reward=Reward(0.5), branches=(branch,))
    group = Group(Prompt("p", (), (9,)), (cut,), 0, 0)
    assert collate([group]).mask.tolist() == [[1, 1], [1, 1]]
    masked = collate([group], mask_truncated=True)
    assert masked.mask.tolist() == [[0, 0], [0, 0]]
    assert masked.prompt_ids == [(9,), (5, 6)] and masked.scores.tolist() == [0.5, 0.5]


def test_a_kl_penalty_is_charged_to_the_last_turn_of_its_own_rollout():
    def of(*turns: float) -> Rollout:
        size = len(turns)
        reward = Reward(sum(turns), turns=turns, kl_penalty=0.25)
        parts = tuple(Turn(i, i + 1, "x", reward) for i, reward in enumerate(turns))
        return Rollout((4,) * size, (-1.0,) * size, (1,) * size, (0,) * size, "stop", "", reward, None, parts)

    batch = collate([Group(Prompt("p", (), (9,)), (of(1.0, 2.0, 3.0), of(5.0)), 0, 0)])
    assert batch.turn_rewards is not None and batch.turn_ids is not None
    assert batch.turn_rewards.tolist() == [[1.0, 2.0, 2.75], [4.75, 0.0, 0.0]]
    assert batch.turn_ids.tolist() == [[0, 1, 2], [0, -1, -1]]


def test_penalties_of_tokens_are_kept_by_token_and_a_sum_lies_on_the_last():
    by_token = Reward(1.0, kl_penalty=0.75, kl_by_token=(0.5, 0.25, 0.0))
    rollouts = tuple(
        Rollout((4,) * size, (-1.0,) * size, (1,) * size, (0,) * size, "stop", reward=reward)
        for size, reward in ((3, by_token), (2, Reward(1.0, kl_penalty=0.5)), (1, Reward(1.0)))
    )
    batch = collate([Group(Prompt("p", (), (9,)), rollouts, 0, 0)])
    assert batch.kl_penalties is not None
    assert batch.kl_penalties.tolist() == [[0.5, 0.25, 0.0], [0.0, 0.5, 0.0], [0.0, 0.0, 0.0]]
    assert collate([Group(Prompt("p", (), (9,)), rollouts[2:], 0, 0)]).kl_penalties is None
    empty = Rollout((), (), (), (), "stop", reward=Reward(0.1, kl_penalty=0.1))
    exact = collate([Group(Prompt("p", (), (9,)), (empty, rollouts[0].with_reward(Reward(0.1, kl_penalty=0.3))), 0, 0)])
    assert exact.kl_penalties is not None and exact.kl_penalties.tolist() == [[0.0, 0.0, 0.0], [0.0, 0.0, 0.3]]
    assert exact.scores.tolist() == [0.0, 0.1 - 0.3]  # to the last bit


def part(size: int, first: int, context: tuple[int, ...] = (), mask: tuple[int, ...] = ()) -> Rollout:
    tokens = tuple(range(first, first + size))
    return Rollout(tokens, (-0.5 * first,) * size, mask or (1,) * size, (0,) * size, "stop", context=context)


def test_branches_follow_all_rollouts_in_order_with_the_score_and_group_of_their_own():
    """Two groups; the first rollout has two branches, the third has one, which is the longest row of the batch."""
    a = dataclasses.replace(
        part(2, 10), reward=Reward(1.0, kl_penalty=0.25), branches=(part(1, 20, (7,)), part(3, 30, (7, 8), (1, 0, 0)))
    )
    b = dataclasses.replace(part(1, 40, context=(6, 6)), reward=Reward(0.5))
    c = dataclasses.replace(part(2, 50), reward=Reward(2.0), branches=(part(4, 60),))
    batch = collate([Group(Prompt("p", (), (1, 2)), (a, b), 0, 0), Group(Prompt("q", (), (3,)), (c,), 1, 0)])
    assert batch.branch_of == (0, 0, 2) and (batch.num_rollouts, batch.num_sequences) == (3, 6)
    assert [ids[0] for ids in batch.response_ids] == [10, 40, 50, 20, 30, 60]
    assert batch.prompt_ids == [(1, 2), (6, 6), (3,), (7,), (7, 8), (3,)]  # a row without a context has its prompt's
    assert batch.group_ids.tolist() == [0, 0, 1, 0, 0, 1]
    assert batch.scores.tolist() == [0.75, 0.5, 2.0, 0.75, 0.75, 2.0]
    assert batch.mask.tolist() == [[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1]]
    assert batch.rollout_log_probs[4].tolist() == [-15.0, -15.0, -15.0, 0.0]
    assert batch.kl_penalties is not None and batch.turn_ids is None is batch.turn_rewards
    assert batch.kl_penalties.tolist() == [[0.0, 0.25, 0.0, 0.0]] + [[0.0] * 4] * 5  # a branch pays nothing again
    alone = batch.without_branches()
    assert alone.scores.tolist() == [0.75, 0.5, 2.0] and alone.branch_of == ()
    assert count_rows(batch, [0, 1, 2, 3, 4, 5]) == BatchTotals(11.0, 3.0)
    assert count_rows(batch, [5, 4, 1]) == BatchTotals(6.0, 1.0)
    assert count_rows(alone, [2, 0]) == BatchTotals(4.0, 2.0)


def test_a_batch_in_which_only_some_rollouts_have_turns():
    """Without rewards by turn the score belongs to the last turn; a rollout without turns has no turn at all."""
    turns = (Turn(0, 1, malformed=True), Turn(2, 4, malformed=False))
    by_turn = Rollout((1,) * 4, (-1.0,) * 4, (1, 0, 1, 1), (0,) * 4, "length", "", Reward(3.0), None, turns)
    partly = dataclasses.replace(by_turn, reward=Reward(2.0, turns=(1.5,), kl_penalty=0.5), finish_reason="stop")
    plain = Rollout((2, 2), (-1.0,) * 2, (1, 1), (0,) * 2, "stop", reward=Reward(5.0))
    group = Group(Prompt("p", (), (9,)), (by_turn, plain, partly), 0, 0)
    batch = collate([group])
    assert batch.turn_rewards is not None and batch.turn_ids is not None
    assert batch.turn_rewards.tolist() == [[0.0, 3.0], [0.0, 0.0], [1.5, -0.5]]
    assert batch.turn_ids.tolist() == [[0, -1, 1, 1], [-1] * 4, [0, -1, 1, 1]]
    whole, half = [[1, 0, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1]], [0, 0, 1, 1]
    assert batch.mask.tolist() == whole
    assert collate([group], mask_malformed=True).mask.tolist() == [half, whole[1], half]
    assert collate([group], mask_truncated=True).mask.tolist() == [[0] * 4, whole[1], whole[2]]
    both = collate([group], mask_truncated=True, mask_malformed=True)
    assert both.mask.tolist() == [[0] * 4, whole[1], half]
    assert both.scores.tolist() == batch.scores.tolist() == [3.0, 5.0, 1.5]


def test_packed_micro_batches_are_as_few_as_their_budget_allows():
    """A response's last token is not run, and a shared prompt is run once: 2 + 3 + 1 = 6 tokens, or 2 + 3 + 2 + 1."""
    rollouts = (rollout(4, (1,) * 4, 1.0), rollout(2, (1,) * 2, 1.0))
    batch = collate([Group(Prompt("a", (), (1, 2)), rollouts, 0, 0)])
    assert split_packed(batch, [0, 1], 6, "shared") == [[0, 1]]
    assert len(split_packed(batch, [0, 1], 5, "shared")) == 2
    assert split_packed(batch, [0, 1], 8, "packed") == [[0, 1]]
    assert len(split_packed(batch, [0, 1], 7, "packed")) == 2
    assert split_packed(batch, [1], 1, "shared") == split_packed(batch, [1], 1, "packed") == [[1]]


def test_bins_are_as_few_as_their_cost_allows():
    assert balance([6], 6) == balance([7], 6) == balance([0], 6) == [[0]]
    assert balance([3, 3], 6) == [[0, 1]] and len(balance([3, 4], 6)) == 2
    assert balance([], 6) == [] and balance([0, 0, 0], 6) == [[0, 1, 2]]
    assert sorted(map(sorted, balance([20, 3, 3], 6))) == [[0], [1, 2]]  # an item above the limit takes one bin
    assert len(balance([4, 4, 4], 7)) == 3  # two bins would be enough for the sum


def test_the_budget_of_ranks_that_share_sequences_is_that_of_all_of_them():
    batch = collate(two_groups() * 2)

    class Pair(Ranks):
        size, ranks_per_sequence = 2, 2

    class Two(Ranks):
        size, rank = 2, 1

    how = {"max_rows": 1, "kind": "plain"}
    single, double = (plan_micro_batches(batch, 9, max_tokens=n, **how) for n in (5, 10))
    assert plan_micro_batches(batch, 9, max_tokens=5, **how, ranks=Pair()) == double != single
    # The other rank has the row that is left over: this one runs a forward that does not count beside it.
    assert plan_micro_batches(batch, 1, max_tokens=None, **how, ranks=Two())[1] == [[]]
