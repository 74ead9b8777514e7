"""Advantage estimators, each written as its formula, and the registry through which a user adds one.

Rewards are [B,T]; outcome estimators use their sum over a row, whether or not the token that carries the reward is
trained on. Every estimator returns (advantages, returns) of shape [B,T], 0 where the mask is 0. A group of one has
no baseline: its advantage is its reward.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gspo.algo.group_stats import GroupStats, best_and_second, group_stats
from gspo.registry import Registry


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The inputs of an estimator; `options` has the values of the extra options that it was registered with."""

    rewards: Tensor  # [B,T]
    mask: Tensor  # [B,T] bool
    group_ids: Tensor  # [B]
    values: Tensor | None = None  # [B,T]
    gamma: float = 1.0
    lam: float = 1.0
    norm_by_std: bool = True
    std_level: str = "group"  # or "batch": whose standard deviation divides
    epsilon: float = 1e-6
    options: Mapping[str, Any] = field(default_factory=dict)


Estimate = tuple[Tensor, Tensor]
Estimator = Callable[[AdvantageInputs], Estimate]


@dataclass(frozen=True, slots=True)
class AdvantageEstimator:
    """A registered estimator and the option names it reads."""

    name: str
    formula: Estimator
    options: tuple[str, ...]

    def __call__(self, x: AdvantageInputs) -> Estimate:
        unknown = sorted(set(x.options) - set(self.options))
        if unknown:
            known = ", ".join(self.options) or "no options"
            raise TypeError(f"adv_estimator={self.name} does not read {', '.join(unknown)}; it reads {known}")
        return self.formula(x)


ADVANTAGE_ESTIMATORS: Registry[AdvantageEstimator] = Registry("adv_estimator")


def advantage_estimator(name: str, *, options: tuple[str, ...] = ()) -> Callable[[Estimator], Estimator]:
    """Register a function `AdvantageInputs -> (advantages, returns)` under `name`."""

    def register(formula: Estimator) -> Estimator:
        ADVANTAGE_ESTIMATORS.add(name, AdvantageEstimator(name, formula, options), source=formula)
        return formula

    return register


@advantage_estimator("grpo")
def grpo(x: AdvantageInputs) -> Estimate:
    """(R - mean)/(std + 1e-6) over the group, unbiased std (arXiv 2402.03300); without std this is Dr.GRPO."""
    stats = _stats(x)
    centred = stats.scores - stats.mean
    std = stats.std if x.std_level == "group" or len(stats.scores) < 2 else stats.scores.std()
    scaled = centred / (std + x.epsilon) if x.norm_by_std else centred
    return _outcome(scaled, stats, x)


@advantage_estimator("dr_grpo")
def dr_grpo(x: AdvantageInputs) -> Estimate:
    """R - mean over the group: GRPO without the division by std (arXiv 2503.20783)."""
    stats = _stats(x)
    return _outcome(stats.scores - stats.mean, stats, x)


@advantage_estimator("rloo")
def rloo(x: AdvantageInputs) -> Estimate:
    """R - mean of the others = (R - mean)·n/(n-1) (arXiv 2402.14740)."""
    stats = _stats(x)
    return _outcome((stats.scores - stats.mean) * stats.size / (stats.size - 1).clamp(min=1), stats, x)


@advantage_estimator("opo")
def opo(x: AdvantageInputs) -> Estimate:
    """R - Σ|y|R/Σ|y|, the variance-minimising baseline of the group (arXiv 2505.23585)."""
    stats = _stats(x)
    length = x.mask.sum(dim=-1).to("cpu", torch.float64)
    total_length = stats.sum_over_group(length).clamp(min=1)
    return _outcome(stats.scores - stats.sum_over_group(length * stats.scores) / total_length, stats, x)


@advantage_estimator("grpo_passk")
def grpo_passk(x: AdvantageInputs) -> Estimate:
    """The group's best gets its lead over the second best, divided by std + 1e-6 unless switched off; others 0."""
    stats = _stats(x)
    best, lead = best_and_second(stats)
    advantage = torch.zeros_like(stats.scores).index_copy_(0, best, lead)
    return _outcome(advantage / (stats.std + x.epsilon) if x.norm_by_std else advantage, stats, x)


@advantage_estimator("gpg")
def gpg(x: AdvantageInputs) -> Estimate:
    """α·(R - mean) over the group, α = responses / responses with a reward other than 0 (arXiv 2504.02546, as in verl)."""
    stats = _stats(x)
    alpha = len(stats.scores) / max(1, int(stats.scores.count_nonzero()))
    return _outcome(alpha * (stats.scores - stats.mean), stats, x)


@advantage_estimator("reinforce_plus_plus")
def reinforce_plus_plus(x: AdvantageInputs) -> Estimate:
    """Discounted reward-to-go, whitened over the batch's trained tokens (arXiv 2501.03262)."""
    returns_BT = rewards_to_go(x.rewards, x.mask, x.gamma)
    return whiten(returns_BT, x.mask), returns_BT


@advantage_estimator("reinforce_plus_plus_baseline")
def reinforce_plus_plus_baseline(x: AdvantageInputs) -> Estimate:
    """R - group mean on every token, whitened over the batch's trained tokens (arXiv 2501.03262)."""
    stats = _stats(x)
    centred_BT, _ = _outcome(stats.scores - stats.mean, stats, x)
    whitened_BT = whiten(centred_BT, x.mask)
    return whitened_BT, whitened_BT


@advantage_estimator("remax", options=("reward_baselines",))
def remax(x: AdvantageInputs) -> Estimate:
    """Reward-to-go minus the reward of the prompt's greedy answer, `reward_baselines` [B] (arXiv 2310.10505)."""
    baselines = x.options.get("reward_baselines")
    if baselines is None:
        raise ValueError("adv_estimator=remax needs reward_baselines, the greedy answer's reward for each row")
    returns_BT = rewards_to_go(x.rewards, x.mask, x.gamma)
    baseline_B1 = torch.as_tensor(baselines, dtype=returns_BT.dtype, device=returns_BT.device).reshape(-1, 1)
    return torch.where(x.mask, returns_BT - baseline_B1, 0.0), returns_BT


@advantage_estimator("gae")
def gae(x: AdvantageInputs) -> Estimate:
    """Generalised advantage estimation with a critic, whitened over the batch (arXiv 1506.02438, eq. 16)."""
    if x.values is None:
        raise ValueError("adv_estimator=gae needs values [B,T] from a critic; choose grpo or rloo to train without one")
    values_BT = torch.where(x.mask, x.values.detach().to(x.rewards.dtype), 0.0)
    raw_BT = torch.zeros_like(x.rewards)
    pending, next_value, running = (x.rewards.new_zeros(len(x.rewards)) for _ in range(3))
    for t in reversed(range(x.rewards.shape[1])):
        trained, pending = x.mask[:, t], pending + x.rewards[:, t]
        delta = pending + x.gamma * next_value - values_BT[:, t]
        running = torch.where(trained, delta + x.gamma * x.lam * running, running)
        next_value = torch.where(trained, values_BT[:, t], next_value)
        pending = torch.where(trained, 0.0, pending)
        raw_BT[:, t] = torch.where(trained, running, 0.0)
    return whiten(raw_BT, x.mask), raw_BT + values_BT


@advantage_estimator("opd", options=("old_log_probs", "ref_log_probs"))
def opd(x: AdvantageInputs) -> Estimate:
    """-(log π_old - log π_teacher) of each token: on-policy distillation, in which the reward plays no part.

    E[A ∇ log π] = -∇ KL(π ‖ π_teacher), the reverse KL token by token (arXiv 2306.13649).
    """
    old, teacher = x.options.get("old_log_probs"), x.options.get("ref_log_probs")
    if old is None or teacher is None:
        raise ValueError(
            "adv_estimator=opd needs old_log_probs and ref_log_probs [B,T], of the policy and of the teacher"
        )
    advantages_BT = distillation(old, teacher, x.mask).to(x.rewards.dtype)
    return advantages_BT, advantages_BT


def distillation(old_log_probs: Tensor, teacher_log_probs: Tensor, mask: Tensor) -> Tensor:
    """log π_teacher - log π_old [B,T] on trained tokens: how much more the teacher likes a token than the policy."""
    return torch.where(mask.bool(), teacher_log_probs.double() - old_log_probs.double(), 0.0)


def rewards_to_go(rewards_BT: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """G_t = r_t + γ·G_next over trained tokens; a reward on an untrained token goes to the trained one before it."""
    returns_BT = torch.zeros_like(rewards_BT)
    pending, running = (rewards_BT.new_zeros(len(rewards_BT)) for _ in range(2))
    for t in reversed(range(rewards_BT.shape[1])):
        trained, pending = mask[:, t], pending + rewards_BT[:, t]
        running = torch.where(trained, pending + gamma * running, running)
        pending = torch.where(trained, 0.0, pending)
        returns_BT[:, t] = torch.where(trained, running, 0.0)
    return returns_BT


def whiten(values_BT: Tensor, mask: Tensor) -> Tensor:
    """(x - mean)/sqrt(unbiased variance + 1e-8) over trained tokens; exactly 0 when they are all equal."""
    chosen = values_BT[mask].to("cpu", torch.float64)
    if chosen.numel() == 0 or chosen.max() == chosen.min():
        return torch.zeros_like(values_BT)
    mean, scale = float(chosen.mean()), math.sqrt(float(chosen.var(unbiased=True)) + 1e-8)
    return torch.where(mask, (values_BT - mean) / scale, 0.0)


def _stats(x: AdvantageInputs) -> GroupStats:
    return group_stats(x.rewards.sum(dim=-1), x.group_ids)


def _outcome(advantage_B: Tensor, stats: GroupStats, x: AdvantageInputs) -> Estimate:
    """The same advantage on every trained token: exactly 0 in flat groups, the reward in groups of one."""
    exact_B = torch.where(stats.single, stats.scores, torch.where(stats.flat, 0.0, advantage_B))
    exact_B1 = exact_B.to(x.rewards.device, x.rewards.dtype).unsqueeze(-1)
    advantages_BT = torch.where(x.mask, exact_B1, 0.0)
    return advantages_BT, advantages_BT
