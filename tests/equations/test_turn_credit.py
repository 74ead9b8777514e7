"""Credit by turn: the returns to go are unbiased on a bandit with a known gradient; what others do is not."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from gspo.algo.aggregation import count_totals
from gspo.algo.losses import get_policy_loss
from gspo.algo.ratios import importance_ratio, sequence_ratio
from gspo.algo.settings import LossSettings
from gspo.algo.turn_credit import spread_over_tokens, turn_advantages
from gspo.training.batch.batching import collate
from gspo.types import Group, LossInputs, Prompt, Reward, Rollout, Turn

# A bandit of two turns. The first choice a earns FIRST[a]; a = 2 ends the episode, else b earns SECOND[a][b].
FIRST = torch.tensor([0.2, -0.4, 0.5], dtype=torch.float64)
SECOND = torch.tensor([[1.0, 0.0], [0.3, 2.0]], dtype=torch.float64)
EPISODES = [(a, b) for a in range(2) for b in range(2)] + [(2, None)]


def parameters() -> Tensor:
    gen = torch.Generator().manual_seed(4)
    return torch.randn(3 + 2 * 2, generator=gen, dtype=torch.float64, requires_grad=True)


def log_probs(theta: Tensor) -> list[Tensor]:
    """The log-probs of the choices of each episode, in the order of EPISODES."""
    first, second = theta[:3].log_softmax(-1), theta[3:].view(2, 2).log_softmax(-1)
    return [torch.stack([first[a]] if b is None else [first[a], second[a][b]]) for a, b in EPISODES]


def rewards(episode: tuple[int, int | None]) -> list[float]:
    a, b = episode
    return [float(FIRST[a])] + ([] if b is None else [float(SECOND[a][b])])


def true_gradient() -> Tensor:
    """∇ Σ_episodes p·(r_1 + r_2)."""
    theta = parameters()
    values = [logs.sum().exp() * sum(rewards(episode)) for episode, logs in zip(EPISODES, log_probs(theta))]
    return torch.autograd.grad(torch.stack(values).sum(), theta)[0]


def expected_gradient(estimate, n: int = 3) -> Tensor:
    """The mean gradient of Σ_i Σ_k A_ik log π over all groups of n episodes, weighted by their probability."""
    theta = parameters()
    logs = log_probs(theta)
    chances = [x.sum().exp().detach() for x in logs]
    total = torch.zeros_like(theta)
    for chosen in itertools.product(range(len(EPISODES)), repeat=n):
        by_turn = torch.zeros(n, 2, dtype=torch.float64)
        for row, index in enumerate(chosen):
            earned = rewards(EPISODES[index])
            by_turn[row, : len(earned)] = torch.tensor(earned, dtype=torch.float64)
        lengths = torch.tensor([len(logs[index]) for index in chosen])
        advantages = estimate(by_turn, lengths)
        loss = sum((advantages[row, : len(logs[index])] * logs[index]).sum() for row, index in enumerate(chosen)) / n
        weight = torch.stack([chances[index] for index in chosen]).prod()
        total += weight * torch.autograd.grad(loss, theta, retain_graph=True)[0]
    return total


def test_returns_to_go_against_siblings_are_unbiased() -> None:
    group = torch.zeros(3, dtype=torch.int64)
    got = expected_gradient(lambda by_turn, lengths: turn_advantages(by_turn, group)[0])
    assert torch.allclose(got, true_gradient(), rtol=1e-10, atol=1e-12)


def test_normalising_each_turn_by_itself_is_biased() -> None:
    def per_turn(by_turn: Tensor, lengths: Tensor) -> Tensor:
        """Each turn's reward normalised over those that reached it, then summed from the turn on."""
        out = torch.zeros_like(by_turn)
        for k in range(2):
            there = lengths > k
            if there.sum() > 1 and by_turn[there, k].std() > 0:
                out[there, k] = (by_turn[there, k] - by_turn[there, k].mean()) / by_turn[there, k].std()
        return out.flip(1).cumsum(1).flip(1)

    def survivors(by_turn: Tensor, lengths: Tensor) -> Tensor:
        """Returns to go against the mean of those that reached the turn."""
        returns = by_turn.flip(1).cumsum(1).flip(1)
        for k in range(2):
            there = lengths > k
            returns[there, k] -= returns[there, k].mean() if there.sum() > 1 else 0.0
        return returns

    want = true_gradient()
    for biased in (per_turn, survivors):
        got = expected_gradient(biased)
        assert 1 - torch.cosine_similarity(got, want, dim=0) > 1e-3, "the direction of the gradient is off"


def test_discounted_returns_and_groups() -> None:
    by_turn = torch.tensor([[1.0, 2.0, 4.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0], [5.0, 1.0, 0.0]])
    advantages, returns = turn_advantages(by_turn, torch.tensor([7, 7, 7, 9]), 0.5)
    assert returns.tolist() == [[3.0, 4.0, 4.0], [0.5, 1.0, 0.0], [3.0, 0.0, 0.0], [5.5, 1.0, 0.0]]
    assert advantages[0].tolist() == [3.0 - 1.75, 4.0 - 0.5, 4.0] and advantages[3].tolist() == [5.5, 1.0, 0.0]


def test_tokens_get_the_value_of_their_turn_and_those_of_no_turn_get_none() -> None:
    values, turns = torch.tensor([[2.0, 3.0]]), torch.tensor([[-1, 0, 0, 1, 1]])
    assert spread_over_tokens(values, turns, torch.tensor([[1, 1, 0, 1, 0]])).tolist() == [[0.0, 2.0, 0.0, 3.0, 0.0]]


def rollout(shape: list[tuple[int, int]], turns: tuple[float, ...], kl: float = 0.0, bad: int = -1) -> Rollout:
    ids, mask, found = 0, [], []
    for number, (own, seen) in enumerate(shape):
        found.append(Turn(ids, ids + own, malformed=number == bad))
        ids += own + seen
        mask += [1] * own + [0] * seen
    reward = Reward(sum(turns), kl_penalty=kl, turns=turns)
    return Rollout((5,) * ids, (-1.0,) * ids, tuple(mask), (0,) * ids, "stop", reward=reward, turns=tuple(found))


def batch(**options):
    rollouts = (rollout([(2, 1), (1, 0)], (0.5, 1.0), kl=0.25, bad=0), rollout([(3, 0)], (2.0,)))
    return collate([Group(Prompt("p", (), (1, 2)), rollouts, 0, 0)], **options)


def test_a_batch_knows_the_turn_of_every_token() -> None:
    found = batch()
    assert found.turn_ids is not None and found.turn_ids.tolist() == [[0, 0, -1, 1], [0, 0, 0, -1]]
    assert found.turn_rewards is not None and found.turn_rewards.tolist() == [[0.5, 0.75], [2.0, 0.0]]
    spread = spread_over_tokens(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), found.turn_ids, found.mask)
    assert spread.tolist() == [[1.0, 1.0, 0.0, 2.0], [3.0, 3.0, 3.0, 0.0]]
    assert batch(mask_malformed=True).mask.tolist() == [[0, 0, 0, 1], [1, 1, 1, 0]]
    plain = Rollout((5, 6), (-1.0, -1.0), (1, 1), (0, 0), "stop", reward=Reward(1.0))
    assert collate([Group(Prompt("p", (), (1,)), (plain,), 0, 0)]).turn_ids is None


def inputs(turn_ids: Tensor | None, mask: Tensor) -> LossInputs:
    gen = torch.Generator().manual_seed(0)
    new, old = (torch.randn(mask.shape, generator=gen, dtype=torch.float64) * 0.1 for _ in range(2))
    advantages = torch.randn(mask.shape, generator=gen, dtype=torch.float64)
    return LossInputs(new.requires_grad_(), old, advantages, mask, count_totals(mask), turn_ids=turn_ids)


def test_the_turn_ratio_is_a_mean_over_each_turn() -> None:
    ids, mask = torch.tensor([[0, 0, -1, 1], [0, 0, 0, -1]]), torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0]]).bool()
    x = inputs(ids, mask)
    ratio = importance_ratio("turn", x)
    change = (x.log_probs - x.old_log_probs).detach()
    assert ratio[0, 0] == ratio[0, 1] and ratio[0, 0].item() == pytest.approx(change[0, :2].mean().exp().item())
    assert ratio[0, 3].item() == pytest.approx(change[0, 3].exp().item())
    assert ratio[1, :3].tolist() == pytest.approx([change[1, :3].mean().exp().item()] * 3)
    (grad,) = torch.autograd.grad(ratio[0, 0], x.log_probs)
    assert grad[0].tolist() == pytest.approx([ratio[0, 0].item() / 2] * 2 + [0.0, 0.0])


def test_without_turns_the_turn_ratio_is_that_of_the_sequence() -> None:
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    x = inputs(None, mask)
    change = torch.where(mask, x.log_probs - x.old_log_probs, 0.0)
    assert torch.equal(importance_ratio("turn", x), sequence_ratio(change, mask).expand(mask.shape))
    loss = {level: get_policy_loss("gspo")(x, LossSettings(level=level)).loss for level in ("sequence", "turn")}
    assert torch.equal(loss["sequence"], loss["turn"])
