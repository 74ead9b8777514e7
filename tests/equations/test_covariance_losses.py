"""clip_cov, kl_cov and gpg against the formulas of their papers, token by token in plain Python floats."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest
import torch

from gspo.algo import count_totals, get_policy_loss
from gspo.algo.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from gspo.algo.losses import token_covariance
from gspo.algo.settings import LossSettings
from gspo.types import LossInputs

LENGTHS = (7, 3, 5, 1)


def case(seed: int) -> tuple[LossInputs, list[tuple[int, int]]]:
    """Random log-probs and advantages, and the (row, column) of each trained token."""
    rng = random.Random(seed)
    width = max(LENGTHS)
    tokens = [(i, t) for i, length in enumerate(LENGTHS) for t in range(length) if (i, t) != (0, 2)]
    tensors = [torch.full((len(LENGTHS), width), math.nan, dtype=torch.float64) for _ in range(3)]
    for i, t in tokens:
        tensors[0][i, t] = -3 * rng.random()
        tensors[1][i, t] = tensors[0][i, t] + rng.gauss(0, 0.3)
        tensors[2][i, t] = rng.gauss(0, 2)
    mask = torch.zeros(len(LENGTHS), width)
    for i, t in tokens:
        mask[i, t] = 1
    new, old, advantages = tensors
    return LossInputs(new.requires_grad_(), old, advantages, mask, count_totals(mask)), tokens


def number(tensor: torch.Tensor) -> float:
    return float(tensor.detach())


def covariances(x: LossInputs, tokens: list[tuple[int, int]]) -> dict[tuple[int, int], float]:
    log_probs = [number(x.log_probs[at]) for at in tokens]
    advantages = [number(x.advantages[at]) for at in tokens]
    mean_log, mean_adv = sum(log_probs) / len(tokens), sum(advantages) / len(tokens)
    return {at: (a - mean_adv) * (p - mean_log) for at, a, p in zip(tokens, advantages, log_probs)}


def check(name: str, settings: LossSettings, x: LossInputs, tokens, value, slope) -> None:
    """The loss is the mean of `value`, its gradient `slope` / number of tokens."""
    loss = get_policy_loss(name)(x, settings).loss
    loss.backward()
    assert loss.item() == pytest.approx(sum(value.values()) / len(tokens), rel=1e-9)
    assert x.log_probs.grad is not None
    for at in tokens:
        assert number(x.log_probs.grad[at]) == pytest.approx(slope[at] / len(tokens), rel=1e-9, abs=1e-15), at
    outside = torch.ones_like(x.mask, dtype=torch.bool)
    for at in tokens:
        outside[at] = False
    assert not x.log_probs.grad[outside].any()


@pytest.mark.parametrize("seed", range(5))
def test_gpg_is_the_policy_gradient(seed):
    x, tokens = case(seed)
    value = {at: -number(x.advantages[at]) * number(x.log_probs[at]) for at in tokens}
    check("gpg", LossSettings(), x, tokens, value, {at: -number(x.advantages[at]) for at in tokens})


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("share", [0.0002, 0.3, 1.0])
def test_kl_cov_penalises_the_tokens_of_the_greatest_covariance(seed, share):
    x, tokens = case(seed)
    ranked = sorted(tokens, key=covariances(x, tokens).__getitem__, reverse=True)
    chosen = set(ranked[: max(1, int(share * len(tokens)))])
    value, slope = {}, {}
    for at in tokens:
        log_ratio, advantage = number(x.log_probs[at] - x.old_log_probs[at]), number(x.advantages[at])
        penalty = 0.7 if at in chosen else 0.0
        value[at] = -advantage * math.exp(log_ratio) + penalty * abs(log_ratio)
        slope[at] = -advantage * math.exp(log_ratio) + penalty * math.copysign(1.0, log_ratio)
    check("kl_cov", LossSettings(kl_cov_ratio=share, kl_cov_coef=0.7), x, tokens, value, slope)


@pytest.mark.parametrize("seed", range(8))
def test_clip_cov_removes_tokens_between_the_bounds(seed):
    """With a share of 1 every candidate is removed, so that the draw does not matter."""
    x, tokens = case(seed)
    covariance, low, high = covariances(x, tokens), 0.3, 2.0
    value, slope, num_removed = {}, {}, 0
    for at in tokens:
        ratio, advantage = math.exp(number(x.log_probs[at] - x.old_log_probs[at])), number(x.advantages[at])
        plain, clipped = -advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2)
        is_clipped = clipped > plain
        removed = not is_clipped and low < covariance[at] < high
        num_removed += removed
        value[at] = 0.0 if removed else max(plain, clipped)
        slope[at] = 0.0 if removed or is_clipped else plain
    assert 0 < num_removed < len(tokens)
    settings = LossSettings(clip_cov_ratio=1.0, clip_cov_bounds=(low, high))
    check("clip_cov", settings, x, tokens, value, slope)


def test_clip_cov_removes_its_share_and_at_least_one():
    x, tokens = case(0)
    full = get_policy_loss("vanilla")(x, LossSettings(clip_c=None)).loss
    (plain,) = torch.autograd.grad(full, x.log_probs)
    for share, expected in ((1e-6, 1), (0.2, int(0.2 * len(tokens)))):
        settings = LossSettings(clip_cov_ratio=share, clip_cov_bounds=(-100.0, 100.0))
        first, again = (
            torch.autograd.grad(get_policy_loss("clip_cov")(x, settings).loss, x.log_probs)[0] for _ in range(2)
        )
        assert torch.equal(first, again)  # the draw is a function of the batch
        assert int(((plain != 0) & (first == 0)).sum()) == expected


def test_without_a_candidate_clip_cov_is_ppo():
    x, _ = case(1)
    ours = get_policy_loss("clip_cov")(x, LossSettings(clip_cov_bounds=(1e6, 2e6))).loss
    assert ours.item() == get_policy_loss("vanilla")(x, LossSettings(clip_c=None)).loss.item()


def test_the_covariance_adds_up_to_that_of_the_tokens():
    x, tokens = case(2)
    clean = LossInputs(
        *(torch.nan_to_num(t) for t in (x.log_probs, x.old_log_probs, x.advantages)), x.mask.bool(), x.totals
    )
    got = token_covariance(clean)
    assert got.sum().item() == pytest.approx(sum(covariances(x, tokens).values()), rel=1e-9)


def test_the_gpg_advantage_is_scaled_by_the_share_of_rewards():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0], [3.0, 0.0], [1.0, 0.0]], dtype=torch.float64)
    inputs = AdvantageInputs(rewards, torch.ones(4, 2, dtype=torch.bool), torch.tensor([0, 0, 1, 1]))
    advantages, _ = ADVANTAGE_ESTIMATORS.get("gpg")(inputs)
    assert advantages[:, 0].tolist() == pytest.approx([4 / 3 * 0.5, -4 / 3 * 0.5, 4 / 3, -4 / 3])
    signed, _ = ADVANTAGE_ESTIMATORS.get("gpg")(dataclasses.replace(inputs, rewards=-rewards))
    assert torch.equal(signed, -advantages)  # a reward below 0 is one, too
