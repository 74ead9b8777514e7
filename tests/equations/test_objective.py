"""The objective of a step: where rewards are placed, what weights do, and how the clip range moves."""

from __future__ import annotations

import dataclasses
import functools
import math
from statistics import mean, variance

import pytest
import torch

from gspo.algo import compute_advantage
from gspo.algo.controllers import ClipController
from gspo.algo.objective import Objective
from gspo.algo.settings import LossSettings
from gspo.metrics import Metric
from gspo.types import ScoredBatch


def objective(target: float | None = 0.2, bounds=(0.5, 2.0), estimator: str = "dr_grpo", **constants) -> Objective:
    settings = LossSettings(clip_low=0.1, clip_high=0.3, aggregation="token-mean", level="sequence")
    advantage = functools.partial(compute_advantage, estimator, **constants)
    return Objective("gspo", settings, advantage, ClipController(target, bounds))


def clipped(*fractions: float) -> dict[str, Metric]:
    """The metrics of an update with these clip fractions by mini-batch."""
    return {
        "actor/pg_clipfrac": Metric.mean(0.9),
        **{f"actor/pg_clipfrac/mb{i}": Metric.mean(value) for i, value in enumerate(fractions)},
    }


@pytest.mark.parametrize(
    ("fractions", "factor"),
    [
        ((0.0, 0.3), 1.05),  # half more than the target: half of the largest change, wider
        ((0.0, 0.1), 0.95),
        ((0.0, 0.2), 1.0),
        ((0.0, 0.9), 1.1),  # never more than a tenth
        ((0.0, 0.0), 0.9),
        ((0.0, 0.1, 0.3), 1.0),  # the mean of the later ones
        ((0.9, 0.2), 1.0),  # the first has ratio 1 and says nothing
        ((0.9,), 1.0),
    ],
)
def test_the_clip_range_moves_towards_its_target_by_the_later_mini_batches(fractions, factor):
    got = objective()
    used = got.observe(clipped(*fractions))
    assert got.clip_range() == pytest.approx((0.1 * factor, 0.3 * factor))
    # What is reported is the range that the step was trained with.
    assert used["actor/clip_ratio_low"].result() == 0.1 and used["actor/clip_ratio_high"].result() == 0.3
    later = used.get("actor/pg_clipfrac_later")
    assert (later is None) == (len(fractions) == 1)
    assert later is None or later.result() == pytest.approx(sum(fractions[1:]) / len(fractions[1:]))


def test_the_clip_range_stays_within_its_bounds_and_as_it_is_without_a_target():
    got, still = objective(), objective(target=None)
    for _ in range(30):
        got.observe(clipped(0, 1.0)), still.observe(clipped(0, 1.0))
    assert got.clip_range() == pytest.approx((0.2, 0.6)) and still.clip_range() == (0.1, 0.3)
    for _ in range(60):
        got.observe(clipped(0, 0.0))
    assert got.clip_range() == pytest.approx((0.05, 0.15))


def test_the_loss_of_a_step_has_its_clip_range_and_the_state_round_trips():
    got, other = objective(), objective()
    got.observe(clipped(0, 0.3))
    other.load_state_dict(got.state_dict())
    for each in (got, other):
        settings = each.loss().settings
        assert (settings.clip_low, settings.clip_high) == pytest.approx((0.105, 0.315))
        assert settings.aggregation == "token-mean" and each.loss().name == "gspo"


def batch() -> ScoredBatch:
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
    zeros = torch.zeros(4, 3)
    return ScoredBatch(
        prompt_ids=[(1,)] * 4,
        response_ids=[(5, 5, 5), (5,), (5, 5), (5, 5, 5)],
        mask=mask,
        group_ids=torch.tensor([0, 0, 1, 1]),
        scores=torch.tensor([1.0, 0.0, 0.25, 0.75], dtype=torch.float64),
        rollout_log_probs=zeros,
        old_log_probs=zeros,
        entropy=None,
        unscored_rows=(),
    )


def test_advantages_come_from_the_scores_of_each_group_and_weights_scale_them():
    got = objective().with_advantages(batch())
    by_row = torch.tensor([0.5, -0.5, -0.25, 0.25], dtype=torch.float64)
    torch.testing.assert_close(got.advantages, by_row[:, None] * batch().mask)
    weights = torch.tensor([1.0, 1.0, 3.0, 3.0], dtype=torch.float64)
    weighted = objective().with_advantages(batch(), weights)
    torch.testing.assert_close(weighted.advantages, (by_row * weights)[:, None] * batch().mask)
    torch.testing.assert_close(weighted.returns, got.returns)


def test_weights_scale_advantages_that_are_whitened_already():
    """Whitening weighted advantages would divide the weights out again."""
    weights = torch.tensor([1.0, 1.0, 3.0, 3.0], dtype=torch.float64)
    by_token = [0.5] * 3 + [-0.5] + [-0.25] * 2 + [0.25] * 3
    centre, spread = mean(by_token), math.sqrt(variance(by_token) + 1e-8)
    by_row = (torch.tensor([0.5, -0.5, -0.25, 0.25], dtype=torch.float64) - centre) / spread
    got = dataclasses.replace(objective(), normalize=True).with_advantages(batch(), weights)
    torch.testing.assert_close(got.advantages, (by_row * weights)[:, None] * batch().mask)


def test_the_reward_lies_on_the_last_token_of_each_response():
    got = objective(estimator="reinforce_plus_plus", gamma=0.5).with_advantages(batch())
    wanted = [[0.25, 0.5, 1.0], [0.0, 0.0, 0.0], [0.125, 0.25, 0.0], [0.1875, 0.375, 0.75]]
    torch.testing.assert_close(got.returns, torch.tensor(wanted, dtype=torch.float64))


def test_a_kl_penalty_is_charged_once_to_the_token_that_causes_it():
    """The score of a response has its penalties in it, so the rewards of its tokens add up to the score."""
    kl = torch.tensor([[0.1, 0.2, 0.3], [0.5, 0.0, 0.0], [0.25, 0.25, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    charged = dataclasses.replace(batch(), kl_penalties=kl)
    got = objective(estimator="reinforce_plus_plus", gamma=1.0).with_advantages(charged)
    wanted = [[1.0, 1.1, 1.3], [0.0, 0.0, 0.0], [0.25, 0.5, 0.0], [0.75, 0.75, 0.75]]
    torch.testing.assert_close(got.returns, torch.tensor(wanted, dtype=torch.float64))


def test_baselines_reach_the_estimator():
    baselines = torch.tensor([0.5, 0.5, 1.0, 1.0], dtype=torch.float64)
    got = objective(estimator="remax").with_advantages(batch(), baselines=baselines)
    assert got.advantages[:, 0].tolist() == [0.5, -0.5, -0.75, -0.25]
