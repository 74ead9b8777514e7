"""The groups of a mini-batch are drawn by the batch's seed: whole groups, every row once, the same in every pass and rank."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.training.batch.batching import collate, group_order, mini_batches, plan_micro_batches
from gspo.training.critic import Critic, CriticSettings, ValueModel
from gspo.training.optim.adamw import MasterOptimizer
from gspo.training.schedule import Schedule
from tests.training.models import llama
from tests.training.test_policy import groups, policy, ready, token_loss
from tests.training.test_ranks import SHAPES, batch_of, place


def shuffled(shape, seed=3):
    return dataclasses.replace(batch_of(shape), order_seed=seed)


@given(shape=SHAPES, seed=st.integers(0, 2**62), epoch=st.integers(0, 3), size=st.integers(1, 4))
def test_every_row_is_in_one_mini_batch_with_its_whole_group(shape, seed, epoch, size):
    batch = shuffled(shape, seed)
    parts = mini_batches(batch.group_ids, size, group_order(batch, epoch))
    assert sorted(row for part in parts for row in part) == list(range(batch.num_sequences))
    of = [set(batch.group_ids[part].tolist()) for part in parts]
    assert sum(len(names) for names in of) == len(shape), "a group is cut"
    assert all(len(names) == size for names in of[:-1])


def test_the_order_is_a_function_of_seed_and_epoch():
    shape = [(2, [3, 4])] * 8
    orders = [group_order(shuffled(shape, seed), epoch) for seed in (3, 4) for epoch in (0, 1)]
    assert orders == [group_order(shuffled(shape, seed), epoch) for seed in (3, 4) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == list(range(8)) for order in orders)


@pytest.mark.parametrize(
    ("seed", "orders"),
    [
        (0, [[1, 5, 2, 7, 4, 6, 3, 0], [5, 1, 4, 0, 3, 2, 6, 7], [2, 7, 1, 3, 5, 4, 6, 0]]),
        (3, [[7, 4, 6, 1, 3, 0, 5, 2], [5, 0, 1, 4, 3, 2, 7, 6], [5, 0, 3, 6, 2, 7, 1, 4]]),
    ],
)
def test_the_order_of_every_epoch_is_frozen(seed, orders):
    """A run that goes on from a checkpoint draws the mini-batches that it would have drawn. 0 is a seed."""
    batch = shuffled([(2, [3, 4])] * 8, seed)
    assert [group_order(batch, epoch) for epoch in range(3)] == orders
    numbered = dataclasses.replace(batch, group_ids=10 * batch.group_ids + 5)
    assert group_order(numbered, 0) == [10 * group + 5 for group in orders[0]]


def test_without_a_seed_neighbours_share_a_mini_batch():
    batch = batch_of([(2, [3, 4])] * 4)
    assert group_order(batch, 0) is None
    assert mini_batches(batch.group_ids, 2, group_order(batch, 1)) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_one_mini_batch_of_all_groups_is_the_same_in_any_order():
    batch = shuffled([(2, [3, 4])] * 4)
    assert group_order(batch, 0) != [0, 1, 2, 3]
    assert mini_batches(batch.group_ids, 4, group_order(batch, 0)) == [list(range(8))]


@pytest.mark.parametrize("epoch", [0, 1])
def test_ranks_draw_the_same_mini_batches(epoch):
    batch = shuffled([(2, [3, 4, 5])] * 6)
    cut = {"max_tokens": 30, "max_rows": 2, "kind": "shared", "epoch": epoch}
    alone = plan_micro_batches(batch, 2, **cut)
    plans = [plan_micro_batches(batch, 2, **cut, ranks=place(rank, 2)) for rank in range(2)]
    for index, whole in enumerate(alone):
        rows = sorted(row for plan in plans for micro in plan[index] for row in micro)
        assert rows == sorted(row for micro in whole for row in micro)


def trained(num_epochs=1, **settings):
    """The mini-batches that an update ran, by epoch, with what it made of the model."""
    p = policy(llama(), num_epochs=num_epochs, **settings)
    batch = p.score(collate(groups(), order_seed=11))
    advantages = torch.randn(batch.mask.shape, generator=torch.Generator().manual_seed(1))
    ran, step = [], p._mini_batch
    p._mini_batch = lambda batch, micros, *rest: (ran.append(micros), step(batch, micros, *rest))[1]
    update = p.update(batch.with_advantages(advantages, advantages), token_loss, step=0)
    return p, update.batch, ran, update.metrics


def test_each_epoch_runs_its_own_order_and_every_row_once():
    p, batch, ran, _ = trained(num_epochs=2)
    assert ran == p.plan(batch, 0) + p.plan(batch, 1)
    epochs = [ran[:3], ran[3:]]
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        assert sorted(row for micros in epoch for rows in micros for row in rows) == list(range(24))
    assert sorted(row for rows in ran[0] for row in rows) != list(range(8)), "the first groups, as if not shuffled"


@pytest.mark.parametrize("source", ["first_pass", "recompute"])
def test_the_ratio_of_the_first_mini_batch_is_one_to_the_last_bit(source):
    losses = []

    def watching(x):
        losses.append(token_loss(x))
        return losses[-1]

    p = policy(llama(), micro_batch_tokens=64, old_log_prob_source=source)
    batch = p.score(collate(groups(), order_seed=11))
    ones = torch.ones_like(batch.mask)
    p.update(batch.with_advantages(ones, ones), watching, step=0)
    off = [int(out.metrics["off"].value) for out in losses]
    first = len(p.plan(batch)[0])
    assert not any(off[:first]) and all(off[first:])


def test_first_pass_is_the_same_update_as_recompute():
    (a, *_), (b, *_) = (trained(num_epochs=2, old_log_prob_source=s) for s in ("recompute", "first_pass"))
    assert all(torch.equal(x, y) for x, y in zip(a.model.parameters(), b.model.parameters()))


def test_the_old_log_probs_are_those_of_the_unshuffled_batch():
    _, batch, _, _ = trained()
    plain = policy(llama(), old_log_prob_source="recompute").score(collate(groups()))
    assert torch.allclose(batch.old_log_probs, plain.old_log_probs, atol=1e-5)


def test_another_order_is_another_update():
    plain = policy(llama())
    plain.update(ready(plain), token_loss, step=0)
    p, *_ = trained()
    assert any(not torch.equal(x, y) for x, y in zip(plain.model.parameters(), p.model.parameters()))


def test_the_critic_runs_the_drawn_mini_batches():
    model = ValueModel(llama())
    optimizer = MasterOptimizer(model.named_parameters(), lr=1e-3)
    critic = Critic(model, optimizer, Schedule(1e-3), CriticSettings(mini_batch_groups=2, num_epochs=2))
    batch = critic.score(collate(groups(), order_seed=11))
    ran, step = [], critic._mini_batch
    critic._mini_batch = lambda batch, micros, lr: (ran.append(micros), step(batch, micros, lr))[1]
    ones = torch.ones_like(batch.mask)
    critic.update(batch.with_old(batch.rollout_log_probs).with_advantages(ones, ones), step=0)
    assert ran == critic.plan(batch, 0) + critic.plan(batch, 1) and ran[:3] != ran[3:]
