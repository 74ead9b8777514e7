"""Rewards on any token, gaps in the mask and every constant together, against sums written out in plain Python."""

from __future__ import annotations

import itertools
import math
import random
from statistics import mean, stdev, variance

import pytest
import torch

from gspo.algo import compute_advantage

WIDTH = 7
GROUPS = (4, 9, 4, 9, 9, 2, 4)  # sizes 3, 3 and 1, mixed


class Answers:
    """Random rewards on every token, trained or not; masks with gaps, and one row without a trained token."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.rewards = [[rng.gauss(0, 1) for _ in range(WIDTH)] for _ in GROUPS]
        self.mask = [[int(rng.random() < 0.6) for _ in range(WIDTH)] for _ in GROUPS]
        self.mask[1] = [0] * WIDTH
        self.values = [[rng.gauss(0, 1) for _ in range(WIDTH)] for _ in GROUPS]
        self.scores = [sum(row) for row in self.rewards]

    def compute(self, name: str, **options):
        rewards, values = (torch.tensor(rows, dtype=torch.float64) for rows in (self.rewards, self.values))
        return compute_advantage(name, rewards, torch.tensor(self.mask), list(GROUPS), values=values, **options)

    def trained(self, row: int) -> list[int]:
        return [t for t in range(WIDTH) if self.mask[row][t]]

    def earned(self, row: int) -> list[float]:
        """Of each trained token: its reward and those of the untrained tokens up to the next trained one."""
        at = [*self.trained(row), WIDTH]
        return [sum(self.rewards[row][a:b]) for a, b in itertools.pairwise(at)]

    def members(self, row: int) -> list[int]:
        return [other for other, group in enumerate(GROUPS) if group == GROUPS[row]]


def assert_rows(got: torch.Tensor, answers: Answers, expected: list[list[float]]) -> None:
    """`expected` has the values of the trained tokens of each row; the others are 0."""
    for row, values in enumerate(expected):
        wanted = [0.0] * WIDTH
        for t, value in zip(answers.trained(row), values, strict=True):
            wanted[t] = value
        assert got[row].tolist() == pytest.approx(wanted, rel=1e-9, abs=1e-11)


def whitened(rows: list[list[float]]) -> list[list[float]]:
    flat = [value for row in rows for value in row]
    centre, scale = mean(flat), math.sqrt(variance(flat) + 1e-8)
    return [[(value - centre) / scale for value in row] for row in rows]


def discounted(earned: list[float], gamma: float) -> list[float]:
    return [sum(gamma ** (k - t) * earned[k] for k in range(t, len(earned))) for t in range(len(earned))]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("gamma", [None, 0.7])
def test_rewards_to_go_pass_over_untrained_tokens(seed, gamma):
    """Of reinforce_plus_plus, and of remax with a baseline for each row; gamma is 1 unless given."""
    answers = Answers(seed)
    options = {} if gamma is None else {"gamma": gamma}
    to_go = [discounted(answers.earned(row), gamma or 1.0) for row in range(len(GROUPS))]
    advantages, returns = answers.compute("reinforce_plus_plus", **options)
    assert_rows(returns, answers, to_go)
    assert_rows(advantages, answers, whitened(to_go))
    baselines = [0.1 * row - 0.2 for row in range(len(GROUPS))]
    advantages, returns = answers.compute("remax", reward_baselines=baselines, **options)
    assert_rows(returns, answers, to_go)
    assert_rows(advantages, answers, [[g - b for g in row] for row, b in zip(to_go, baselines)])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("gamma", "lam"), [(None, None), (0.9, 0.6), (0.5, 1.0)])
def test_gae_passes_over_untrained_tokens(seed, gamma, lam):
    answers = Answers(seed)
    options = {} if gamma is None else {"gamma": gamma, "lam": lam}
    gamma, lam = gamma or 1.0, lam or 1.0
    raw, values = [], []
    for row in range(len(GROUPS)):
        earned, own = answers.earned(row), [answers.values[row][t] for t in answers.trained(row)]
        deltas = [r + gamma * following - v for r, v, following in zip(earned, own, [*own[1:], 0.0])]
        raw.append(discounted(deltas, gamma * lam))
        values.append(own)
    advantages, returns = answers.compute("gae", **options)
    assert_rows(returns, answers, [[a + v for a, v in zip(*rows)] for rows in zip(raw, values)])
    assert_rows(advantages, answers, whitened(raw))


def outcome(name: str, answers: Answers, row: int, std: str | None) -> float:
    """The advantage of a row by its formula; `std` says whose deviation divides, None: nobody's."""
    members, score = answers.members(row), answers.scores[row]
    group = [answers.scores[other] for other in members]
    if len(group) == 1:
        return score
    divide = 1.0
    if std is not None and name in ("grpo", "grpo_passk"):
        whole_batch = std == "batch" and name == "grpo"
        divide = stdev(answers.scores if whole_batch else group) + 1e-6
    if name in ("grpo", "dr_grpo", "reinforce_plus_plus_baseline"):
        return (score - mean(group)) / divide
    if name == "rloo":
        return score - mean(answers.scores[other] for other in members if other != row)
    if name == "opo":
        lengths = [sum(answers.mask[other]) for other in members]
        return score - sum(n * s for n, s in zip(lengths, group)) / sum(lengths)
    if name == "gpg":
        return (score - mean(group)) * len(GROUPS) / sum(s != 0 for s in answers.scores)
    assert name == "grpo_passk"
    first, second = sorted(group, reverse=True)[:2]
    return (first - second if score == first else 0.0) / divide


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("std", [None, "group", "batch"])
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "gpg", "grpo_passk"])
def test_a_response_is_worth_the_sum_of_its_rewards(name, std, seed):
    """Rewards on all tokens count, trained or not, and only grpo reads whose deviation divides."""
    answers = Answers(seed)
    options = {"norm_adv_by_std_in_grpo": std is not None, "std_level": std or "batch"}
    advantages, returns = answers.compute(name, **options)
    expected = [[outcome(name, answers, row, std)] * len(answers.trained(row)) for row in range(len(GROUPS))]
    assert_rows(advantages, answers, expected)
    assert torch.equal(advantages, returns)


def test_the_whitened_group_baseline_is_its_own_return():
    answers = Answers(5)
    centred = [[outcome("dr_grpo", answers, row, None)] * len(answers.trained(row)) for row in range(len(GROUPS))]
    advantages, returns = answers.compute("reinforce_plus_plus_baseline")
    assert_rows(advantages, answers, whitened(centred))
    assert_rows(returns, answers, whitened(centred))


def test_a_flat_group_is_exactly_0_under_the_deviation_of_the_batch():
    scores = torch.tensor([[0.1], [0.1], [0.1], [1.0], [0.0]], dtype=torch.float64)
    advantages, _ = compute_advantage("grpo", scores, torch.ones(5, 1), [0, 0, 0, 1, 1], std_level="batch")
    spread = stdev([0.1, 0.1, 0.1, 1.0, 0.0]) + 1e-6
    assert advantages[:3].flatten().tolist() == [0.0, 0.0, 0.0]
    assert advantages[3:].flatten().tolist() == pytest.approx([0.5 / spread, -0.5 / spread], rel=1e-12)


@pytest.mark.parametrize("scores", [[0.0, 0.0, 0.0], [0.0, 2.0, -2.0]])
def test_gpg_counts_rewards_other_than_0_and_divides_by_no_less_than_1(scores):
    rewards = torch.tensor(scores, dtype=torch.float64)[:, None]
    advantages, _ = compute_advantage("gpg", rewards, torch.ones(3, 1), ["a", "a", "a"])
    assert advantages.flatten().tolist() == pytest.approx([1.5 * score for score in scores])


def test_the_best_of_each_group_leads_wherever_its_rows_lie():
    """Two answers of one group around a group of one, which comes last by number: no lead crosses groups."""
    scores = torch.tensor([[3.0], [7.0], [1.0], [5.0], [5.5]], dtype=torch.float64)
    groups = torch.tensor([1, 8, 1, 0, 0])
    advantages, _ = compute_advantage("grpo_passk", scores, torch.ones(5, 1), groups, norm_adv_by_std_in_grpo=False)
    assert advantages.flatten().tolist() == [2.0, 7.0, 0.0, 0.0, 0.5]


def test_distillation_needs_both_policies_and_ignores_the_reward():
    old, teacher = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-4.0, -1.5, float("nan")]])
    rewards, mask = torch.tensor([[5.0, 0.0, 7.0]]), torch.tensor([[1, 1, 0]])
    for given in ({"old_log_probs": old}, {"ref_log_probs": teacher}):
        with pytest.raises(ValueError, match="needs old_log_probs and ref_log_probs"):
            compute_advantage("opd", rewards, mask, [0], **given)
    advantages, returns = compute_advantage("opd", rewards, mask, [0], old_log_probs=old, ref_log_probs=teacher)
    assert advantages.tolist() == returns.tolist() == [[-3.0, 0.5, 0.0]]
    assert advantages.dtype == rewards.dtype
