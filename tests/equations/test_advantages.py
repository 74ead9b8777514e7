"""Advantage estimators against plain-Python loops written from their formulas."""

from __future__ import annotations

import math
import random
from statistics import mean, stdev, variance

import pytest
import torch

from gspo.algo import compute_advantage
from gspo.algo.advantages import ADVANTAGE_ESTIMATORS, AdvantageInputs
from gspo.algo.group_stats import best_and_second, group_stats

NINE = (
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "grpo_passk",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "gae",
)
GROUPED = ("grpo", "dr_grpo", "rloo", "opo", "grpo_passk")


class Rows:
    """Answers in shuffled groups of sizes 1, 2, 3, 5 with lengths 1-6; the reward stands on the last token."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.groups = [g for g, size in enumerate((1, 2, 3, 5)) for _ in range(size)]
        rng.shuffle(self.groups)
        self.lengths = [rng.randint(1, 6) for _ in self.groups]
        self.scores = [rng.gauss(0, 1) for _ in self.groups]
        self.width = 6

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rewards = torch.zeros(len(self.groups), self.width, dtype=torch.float64)
        mask = torch.zeros(len(self.groups), self.width, dtype=torch.int64)
        for i, (length, score) in enumerate(zip(self.lengths, self.scores)):
            rewards[i, length - 1] = score
            mask[i, :length] = 1
        return rewards, mask, torch.tensor(self.groups)

    def members(self, i: int) -> list[int]:
        return [j for j, g in enumerate(self.groups) if g == self.groups[i]]


def by_hand(name: str, rows: Rows, i: int, use_std: bool) -> float:
    members = rows.members(i)
    group = [rows.scores[j] for j in members]
    score = rows.scores[i]
    if len(group) == 1:
        return score
    if name in ("grpo", "dr_grpo"):
        centred = score - mean(group)
        return centred / (stdev(group) + 1e-6) if use_std and name == "grpo" else centred
    if name == "rloo":
        return score - mean(rows.scores[j] for j in members if j != i)
    if name == "opo":
        tokens = sum(rows.lengths[j] for j in members)
        return score - sum(rows.lengths[j] * rows.scores[j] for j in members) / tokens
    assert name == "grpo_passk"
    first, second = sorted(group, reverse=True)[:2]
    lead = first - second if score == first else 0.0
    return lead / (stdev(group) + 1e-6) if use_std else lead


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("use_std", [True, False])
@pytest.mark.parametrize("name", GROUPED)
def test_group_estimators(name, use_std, seed):
    rows = Rows(seed)
    rewards, mask, ids = rows.tensors()
    advantages, returns = compute_advantage(name, rewards, mask, ids, norm_adv_by_std_in_grpo=use_std)
    assert torch.equal(advantages, returns)
    for i, length in enumerate(rows.lengths):
        expected = [by_hand(name, rows, i, use_std)] * length + [0.0] * (rows.width - length)
        assert advantages[i].tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_the_deviation_of_the_batch_is_that_of_all_its_scores():
    rows = Rows(4)
    rewards, mask, ids = rows.tensors()
    advantages, _ = compute_advantage("grpo", rewards, mask, ids, std_level="batch")
    for i, length in enumerate(rows.lengths):
        alone = len(rows.members(i)) == 1
        centred = by_hand("dr_grpo", rows, i, False)
        expected = centred if alone else centred / (stdev(rows.scores) + 1e-6)
        assert advantages[i, :length].tolist() == pytest.approx([expected] * length, rel=1e-12)


def whiten_by_hand(values: list[list[float]]) -> list[list[float]]:
    flat = [v for row in values for v in row]
    centre, scale = mean(flat), math.sqrt(variance(flat) + 1e-8)
    return [[(v - centre) / scale for v in row] for row in values]


def assert_rows(tensor: torch.Tensor, expected: list[list[float]]) -> None:
    for row, values in zip(tensor, expected, strict=True):
        padded = values + [0.0] * (tensor.shape[1] - len(values))
        assert row.tolist() == pytest.approx(padded, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus(gamma):
    rows = Rows(1)
    rewards, mask, ids = rows.tensors()
    to_go = [[score * gamma ** (n - 1 - t) for t in range(n)] for score, n in zip(rows.scores, rows.lengths)]
    advantages, returns = compute_advantage("reinforce_plus_plus", rewards, mask, ids, gamma=gamma)
    assert_rows(returns, to_go)
    assert_rows(advantages, whiten_by_hand(to_go))


def test_reinforce_plus_plus_baseline():
    rows = Rows(2)
    rewards, mask, ids = rows.tensors()
    centred = [[by_hand("dr_grpo", rows, i, False)] * n for i, n in enumerate(rows.lengths)]
    advantages, _ = compute_advantage("reinforce_plus_plus_baseline", rewards, mask, ids)
    assert_rows(advantages, whiten_by_hand(centred))


def test_remax_with_rewards_on_several_tokens():
    rewards = torch.tensor([[0.5, 0.0, 1.0], [0.25, 2.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    advantages, returns = compute_advantage("remax", rewards, mask, [0, 1], reward_baselines=[1.0, 0.5])
    assert_rows(returns, [[1.5, 1.0, 1.0], [2.25, 2.0]])
    assert_rows(advantages, [[0.5, 0.0, 0.0], [1.75, 1.5]])


def gae_by_hand(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    n = len(rewards)
    deltas = [rewards[t] + gamma * (values[t + 1] if t + 1 < n else 0.0) - values[t] for t in range(n)]
    return [sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, n)) for t in range(n)]


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.95, 0.9), (1.0, 0.0)])
def test_gae(gamma, lam):
    rows = Rows(3)
    rewards, mask, ids = rows.tensors()
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(rewards.shape, dtype=torch.float64, generator=generator)
    values[mask == 0] = float("nan")
    raw = [gae_by_hand(rewards[i, :n].tolist(), values[i, :n].tolist(), gamma, lam) for i, n in enumerate(rows.lengths)]
    values.requires_grad_()
    advantages, returns = compute_advantage("gae", rewards, mask, ids, values=values, gamma=gamma, lam=lam)
    assert not advantages.requires_grad and not returns.requires_grad  # the critic is not trained through them
    assert_rows(returns, [[a + v for a, v in zip(row, values[i].tolist())] for i, row in enumerate(raw)])
    assert_rows(advantages, whiten_by_hand(raw))


def test_untrained_tokens_inside_an_answer_are_skipped():
    """Tool output in the middle, and a reward that stands on an untrained last token, change no return."""
    plain, gaps = torch.zeros(1, 2, dtype=torch.float64), torch.zeros(1, 5, dtype=torch.float64)
    plain[0, 1] = gaps[0, 4] = 1.0
    values = torch.tensor([[0.3, 0.7]], dtype=torch.float64)
    wide_values = torch.tensor([[0.3, 9.0, 9.0, 0.7, 9.0]], dtype=torch.float64)
    wide_mask = torch.tensor([[1, 0, 0, 1, 0]])
    for name in ("gae", "reinforce_plus_plus"):
        narrow = compute_advantage(name, plain, torch.ones(1, 2), [0], values=values, gamma=0.9, lam=0.8)
        wide = compute_advantage(name, gaps, wide_mask, [0], values=wide_values, gamma=0.9, lam=0.8)
        for a, b in zip(narrow, wide):
            torch.testing.assert_close(b[:, [0, 3]], a, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("reward", "count"), [(0.1, 7), (0.7, 12), (1 / 3, 5), (1e8 + 0.1, 6)])
@pytest.mark.parametrize("name", [*GROUPED, "reinforce_plus_plus_baseline"])
def test_identical_rewards_give_exactly_zero(name, reward, count, dtype):
    rewards = torch.zeros(count, 4, dtype=dtype)
    rewards[:, -1] = reward
    mask = torch.ones(count, 4)
    mask[0, 1:] = 0
    advantages, _ = compute_advantage(name, rewards, mask, ["uid"] * count)
    assert torch.equal(advantages, torch.zeros_like(rewards))


def test_mean_subtraction_alone_would_not_be_exact():
    """Shows that the case above can fail: the mean of seven equal numbers is not that number."""
    rewards = torch.full((7,), 0.1, dtype=torch.float64)
    assert sum(rewards.tolist()) / 7 != 0.1


def test_statistics_of_flat_groups_are_exact():
    scores = torch.tensor([0.1] * 7 + [0.7] * 12 + [1.0, 2.0], dtype=torch.float64)
    stats = group_stats(scores, torch.tensor([4] * 7 + [2] * 12 + [9, 9]))
    assert torch.equal(stats.std[:19], torch.zeros(19, dtype=torch.float64))
    assert torch.equal(stats.mean[:19], stats.scores[:19])
    assert stats.mean[19:].tolist() == [1.5, 1.5]
    assert stats.std[19:].tolist() == pytest.approx([math.sqrt(0.5)] * 2)


@pytest.mark.parametrize("groups", [[7], [7, 7], [3, 7, 7], [7, 3, 3, 3, 5, 7], [1, 2, 3], [4, 4, 4]])
def test_the_best_leads_the_second_of_its_own_group_and_one_alone_leads_by_its_score(groups):
    scores = [0.5, 4.0, -1.0, 3.25, 2.0, 4.5][: len(groups)]
    best, lead = best_and_second(group_stats(torch.tensor(scores, dtype=torch.float64), torch.tensor(groups)))
    for number, group in enumerate(sorted(set(groups))):
        rows = [row for row in range(len(groups)) if groups[row] == group]
        ranked = sorted((scores[row] for row in rows), reverse=True)
        assert int(best[number]) == max(rows, key=scores.__getitem__)
        assert float(lead[number]) == (ranked[0] - ranked[1] if len(ranked) > 1 else ranked[0])


@pytest.mark.parametrize("name", [*GROUPED])
def test_group_of_one_keeps_its_reward(name):
    rewards = torch.tensor([[0.0, 0.7], [0.3, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1, 1], [1, 0]])
    advantages, _ = compute_advantage(name, rewards, mask, [5, 3])
    assert advantages.tolist() == [[0.7, 0.7], [0.3, 0.0]]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("std_level", ["group", "batch"])
def test_a_batch_of_one_response_keeps_its_reward_without_a_warning(std_level):
    rewards = torch.tensor([[0.0, 0.7]], dtype=torch.float64)
    advantages, _ = compute_advantage("grpo", rewards, torch.ones(1, 2), ["only"], std_level=std_level)
    assert advantages.tolist() == [[0.7, 0.7]]


def test_inputs_of_an_estimator_that_nobody_gave():
    x = AdvantageInputs(torch.ones(1, 1), torch.ones(1, 1).bool(), torch.zeros(1, dtype=torch.int64))
    assert (x.values, x.gamma, x.lam, x.norm_by_std, x.std_level) == (None, 1.0, 1.0, True, "group")
    assert (x.epsilon, dict(x.options)) == (1e-6, {})


def test_passk_tie_for_the_best_earns_nothing():
    rewards = torch.tensor([[1.0], [1.0], [0.0]])
    advantages, _ = compute_advantage("grpo_passk", rewards, torch.ones(3, 1), [0, 0, 0])
    assert torch.equal(advantages, torch.zeros(3, 1))


def test_an_answer_without_trained_tokens_still_informs_its_group():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    mask = torch.tensor([[0, 0], [1, 1]])
    advantages, _ = compute_advantage("dr_grpo", rewards, mask, [0, 0])
    assert advantages.tolist() == [[0.0, 0.0], [-0.5, -0.5]]


def test_nine_estimators_are_registered():
    assert set(NINE) <= set(ADVANTAGE_ESTIMATORS.names())


@pytest.mark.parametrize("name", NINE)
def test_empty_masks_and_one_token_batches_are_finite(name):
    extra = {"reward_baselines": [0.5, 0.5]} if name == "remax" else {}
    for mask in (torch.zeros(2, 3), torch.tensor([[1, 0, 0], [0, 0, 0]])):
        rewards = torch.tensor([[0.3, 0.0, 0.0], [0.9, 0.0, 0.0]])
        result = compute_advantage(name, rewards, mask, [0, 0], values=torch.zeros(2, 3), **extra)
        for tensor in result:
            assert tensor.isfinite().all()
            assert torch.equal(tensor[mask == 0], torch.zeros_like(tensor[mask == 0]))


class TestMessages:
    REWARDS, MASK = torch.ones(2, 1), torch.ones(2, 1)

    def test_failed_reward(self):
        rewards = torch.tensor([[1.0], [float("nan")]])
        with pytest.raises(ValueError, match="row 1"):
            compute_advantage("grpo", rewards, self.MASK, [0, 0])

    def test_unknown_name(self):
        with pytest.raises(ValueError, match="did you mean 'grpo'"):
            compute_advantage("grpoo", self.REWARDS, self.MASK, [0, 0])

    def test_missing_roles(self):
        with pytest.raises(ValueError, match="values"):
            compute_advantage("gae", self.REWARDS, self.MASK, [0, 0])
        with pytest.raises(ValueError, match="reward_baselines"):
            compute_advantage("remax", self.REWARDS, self.MASK, [0, 0])

    def test_option_nobody_reads(self):
        with pytest.raises(TypeError, match="adv_estimator=grpo does not read reward_baselines"):
            compute_advantage("grpo", self.REWARDS, self.MASK, [0, 0], reward_baselines=[0, 0])

    def test_options_that_nobody_reads_are_listed_with_those_that_are_read(self):
        given = {"zeta": 1, "alpha": 2, "reward_baselines": [0, 0]}
        with pytest.raises(TypeError, match=r"remax does not read alpha, zeta; it reads reward_baselines$"):
            compute_advantage("remax", self.REWARDS, self.MASK, [0, 0], **given)
        with pytest.raises(TypeError, match=r"rloo does not read alpha; it reads no options$"):
            compute_advantage("rloo", self.REWARDS, self.MASK, [0, 0], alpha=2)

    def test_group_ids_of_another_length(self):
        with pytest.raises(ValueError, match="group_ids has 3 entries"):
            compute_advantage("grpo", self.REWARDS, self.MASK, [0, 0, 1])
