"""Branches of a rollout: they share its reward, no baseline counts them, and denominators count rollouts."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import Tensor

from gspo.algo import compute_advantage
from gspo.algo.controllers import ClipController
from gspo.algo.objective import BoundLoss, Objective
from gspo.algo.settings import LossSettings
from gspo.training.batch.batching import collate
from gspo.types import AdvantageBatch, Group, Rollout
from tests.training.models import VOCAB
from tests.training.test_policy import groups
from tests.training.test_update_values import CUTS, assert_gradient, make

NORM_LENGTH = 7.0


def part(size: int, gen: torch.Generator) -> Rollout:
    """A conversation with its own context, in which every third token is an observation."""
    context, tokens = (tuple(torch.randint(0, VOCAB, (n,), generator=gen).tolist()) for n in (3, size))
    mask = tuple(int(i % 3 != 1) for i in range(size))
    return Rollout(tokens, (-1.0,) * size, mask, (0,) * size, "stop", context=context)


def branched() -> list[Group]:
    """Groups whose rollouts have no, one or two branches."""
    gen = torch.Generator().manual_seed(5)
    return [
        group.with_rollouts(
            tuple(
                dataclasses.replace(rollout, branches=tuple(part(2 + 3 * i + b, gen) for b in range((g + i) % 3)))
                for i, rollout in enumerate(group.rollouts)
            )
        )
        for g, group in enumerate(groups(num=4, n=3, seed=2))
    ]


def objective(loss: str, aggregation: str | None) -> Objective:
    settings = BoundLoss(loss, LossSettings(aggregation=aggregation, norm_length=NORM_LENGTH)).settings
    return Objective(loss, settings, functools.partial(compute_advantage, "dr_grpo"), ClipController(None, (0.5, 2.0)))


def advantages(found: list[Group]) -> Tensor:
    """By rollout: its reward less the mean of its group's rollouts."""
    rewards = torch.tensor([[r.reward.final for r in g.rollouts if r.reward is not None] for g in found]).double()
    return (rewards - rewards.mean(-1, keepdim=True)).flatten()


def rows_of_rollouts(batch: AdvantageBatch) -> list[list[int]]:
    """The rows of each rollout: its own and its branches'."""
    rows = [[row] for row in range(batch.num_rollouts)]
    for row, rollout in enumerate(batch.branch_of, start=batch.num_rollouts):
        rows[rollout].append(row)
    return rows


def wanted_loss(batch: AdvantageBatch, advantage: Tensor, log_probs: Tensor, aggregation: str) -> Tensor:
    """The loss at ratio 1, with every rollout as the one sequence of all its model tokens."""
    mask = batch.mask.bool()
    tokens = [torch.cat([log_probs[row][mask[row]] for row in rows]) for rows in rows_of_rollouts(batch)]
    if aggregation == "token-mean":
        return -sum((a * t.sum() for a, t in zip(advantage, tokens)), torch.zeros(())) / sum(map(len, tokens))
    by_rollout = {
        "seq-mean-token-mean": [t.mean() for t in tokens],
        "seq-mean-token-sum": [t.sum() for t in tokens],
        "seq-mean-token-sum-norm": [t.sum() / NORM_LENGTH for t in tokens],
    }
    return -(advantage * torch.stack(by_rollout[aggregation])).mean()


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize(
    ("loss", "aggregation"),
    [
        ("gspo", "seq-mean-token-mean"),
        ("vanilla", "seq-mean-token-mean"),
        ("vanilla", "token-mean"),
        ("vanilla", "seq-mean-token-sum"),
        ("vanilla", "seq-mean-token-sum-norm"),
    ],
)
def test_the_gradient_is_that_of_rollouts_as_single_sequences(loss: str, aggregation: str, cut: str) -> None:
    found, policy, aim = branched(), make(**CUTS[cut]), objective(loss, aggregation)
    batch = aim.with_advantages(policy.score(collate(found)))
    assert (batch.num_rollouts, len(batch.branch_of)) == (12, 12)
    policy.update(batch, BoundLoss(loss, aim.settings), step=0)
    advantage = advantages(found)
    assert_gradient(policy, lambda logs, _: wanted_loss(batch, advantage, logs, aggregation), batch)


def test_branches_have_the_advantage_of_their_rollout() -> None:
    """No baseline counts them: the advantages of rollouts are those of the same groups without branches."""
    found, policy, aim = branched(), make(), objective("vanilla", "token-mean")
    batch = aim.with_advantages(policy.score(collate(found)))
    mask = batch.mask.bool()
    for rows, advantage in zip(rows_of_rollouts(batch), advantages(found)):
        for row in rows:
            torch.testing.assert_close(batch.advantages[row][mask[row]], advantage.expand(int(mask[row].sum())))
