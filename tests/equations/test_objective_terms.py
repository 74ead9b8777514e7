"""The parts of an objective together: turns, branches, weights, whitening, a teacher and KL in one batch."""

from __future__ import annotations

import dataclasses
import functools
import math
from statistics import mean, stdev, variance

import pytest
import torch
from torch import Tensor

from gspo.algo import compute_advantage
from gspo.algo.controllers import ClipController
from gspo.algo.objective import Objective
from gspo.algo.settings import LossSettings
from gspo.metrics import Metric
from gspo.types import ScoredBatch

MASK = torch.tensor([[1, 0, 1, 1], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 0, 0], [1, 1, 0, 0], [0, 1, 1, 1]])
OLD = -0.1 * torch.arange(24, dtype=torch.float64).reshape(6, 4)
TEACHER = OLD + 0.01 * torch.arange(24, dtype=torch.float64).reshape(6, 4).flip(1)


def batch(**changes: object) -> ScoredBatch:
    """Two groups, of 3 and 1 rollouts; the last two rows are branches of the rollouts 2 and 0."""
    lengths = (4, 2, 3, 2, 2, 4)
    whole = ScoredBatch(
        prompt_ids=[(1,)] * 6,
        response_ids=[(5,) * length for length in lengths],
        mask=MASK.float(),
        group_ids=torch.tensor([3, 3, 3, 1, 3, 3]),
        scores=torch.tensor([1.0, 0.0, 0.5, 2.0, 0.5, 1.0], dtype=torch.float64),
        rollout_log_probs=OLD,
        ref_log_probs=TEACHER,
        old_log_probs=OLD,
        entropy=None,
        unscored_rows=(),
        branch_of=(2, 0),
    )
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]


def objective(
    estimator: str = "dr_grpo", aggregation: str = "token-mean", std_level: str = "group", **changes: object
) -> Objective:
    settings = LossSettings(clip_low=0.1, clip_high=0.3, aggregation=aggregation, level="sequence")
    advantage = functools.partial(compute_advantage, estimator, std_level=std_level)
    return Objective("gspo", settings, advantage, ClipController(None), **changes)  # type: ignore[arg-type]


CENTRED = [0.5, -0.5, 0.0, 2.0]  # the score less the mean of the rollouts of its group; a group of one keeps its score


def by_row(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None] * MASK


def test_weights_scale_a_rollout_and_its_branches_alike() -> None:
    weights = torch.tensor([2.0, 4.0, 0.5, 0.25], dtype=torch.float64)
    got = objective().with_advantages(batch(), weights)
    torch.testing.assert_close(got.advantages, by_row([1.0, -2.0, 0.0, 0.5, 0.0, 1.0]))
    torch.testing.assert_close(got.returns, by_row([*CENTRED, 0.0, 0.5]))  # what a critic learns has no weights
    assert got.branch_of == (2, 0) and torch.equal(got.mask, MASK.float())


def test_rows_of_a_rollout_share_its_weight_by_their_tokens_where_rows_are_averaged() -> None:
    """Rollout 0 has 3 tokens and a branch of 3, rollout 2 has 3 and a branch of 2."""
    got = objective("rloo", "seq-mean-token-mean").with_advantages(batch())
    shares = torch.tensor([3 / 6, 1.0, 3 / 5, 1.0, 2 / 5, 3 / 6], dtype=torch.float64)
    scores = [1.0 - 0.25, 0.0 - 0.75, 0.5 - 0.5, 2.0, 0.0, 0.75]
    torch.testing.assert_close(got.advantages, by_row(scores) * shares[:, None])
    torch.testing.assert_close(got.returns, by_row(scores))


def test_branches_are_in_no_deviation_baseline_or_value() -> None:
    """Rows of branches have the scores, groups and values of their own, which no estimator may see."""
    spread = stdev([1.0, 0.0, 0.5, 2.0]) + 1e-6
    centred = objective("grpo", std_level="batch").with_advantages(batch()).advantages
    torch.testing.assert_close(centred, by_row([0.5 / spread, -0.5 / spread, 0.0, 2.0, 0.0, 0.5 / spread]))
    baselines = torch.tensor([0.25, 0.5, 1.0, 3.0], dtype=torch.float64)
    remax = objective("remax").with_advantages(batch(), baselines=baselines).advantages
    torch.testing.assert_close(remax, by_row([0.75, -0.5, -0.5, -1.0, -0.5, 0.75]))
    values = torch.full((6, 4), 7.0, dtype=torch.float64)
    values[:4] = torch.rand(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    whole = objective("gae").with_advantages(batch(values=values))
    alone = objective("gae").with_advantages(batch(values=values).without_branches())
    assert torch.equal(whole.advantages[:4], alone.advantages) and torch.equal(whole.returns[:4], alone.returns)
    for row, rollout in ((4, 2), (5, 0)):
        own = whole.advantages[row][MASK[row] == 1]
        wanted = alone.advantages[rollout][MASK[rollout] == 1].mean()
        torch.testing.assert_close(own, wanted.expand(len(own)))


def test_a_rollout_without_trained_tokens_has_advantages_of_0_in_all_its_rows() -> None:
    mask = MASK.clone()
    mask[[0, 5]] = 0
    got = objective("dr_grpo", "seq-mean-token-mean").with_advantages(batch(mask=mask.float()))
    assert not got.advantages[[0, 5]].any() and not got.returns[[0, 5]].any()
    assert got.advantages.isfinite().all() and got.advantages[1, 0] == -0.5  # its reward still counts


def test_whitening_is_over_the_tokens_of_the_rollouts_and_weights_come_after_it() -> None:
    tokens = [a for row, a in enumerate(CENTRED) for _ in range(int(MASK[row].sum()))]
    centre, scale = mean(tokens), math.sqrt(variance(tokens) + 1e-8)
    white = [(a - centre) / scale for a in CENTRED]
    weights = [2.0, 4.0, 0.5, 0.25]
    wanted = [a * w for a, w in zip(white, weights)]
    got = objective(normalize=True).with_advantages(batch(), torch.tensor(weights, dtype=torch.float64))
    torch.testing.assert_close(got.advantages, by_row([*wanted, wanted[2], wanted[0]]))


def test_a_teacher_is_added_after_whitening_and_weights() -> None:
    weights = torch.tensor([2.0, 4.0, 0.5, 0.25], dtype=torch.float64)
    rows = batch().without_branches()
    plain = objective(normalize=True).with_advantages(rows, weights).advantages
    both = objective(normalize=True, distill_weight=0.5).with_advantages(rows, weights).advantages
    torch.testing.assert_close(both - plain, 0.5 * (TEACHER - OLD)[:4] * MASK[:4])


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_every_token_of_a_branch_has_the_opinion_of_the_teacher_on_itself(aggregation: str) -> None:
    """Scaled like the rest of its row where rows are averaged: rollouts 0 and 2 have rows of 3 + 3 and 3 + 2 tokens."""
    plain = objective(aggregation=aggregation).with_advantages(batch())
    both = objective(aggregation=aggregation, distill_weight=0.5).with_advantages(batch())
    shares = [3 / 6, 1.0, 3 / 5, 1.0, 2 / 5, 3 / 6] if aggregation == "seq-mean-token-mean" else [1.0] * 6
    torch.testing.assert_close(both.advantages - plain.advantages, 0.5 * (TEACHER - OLD) * by_row(shares))
    assert torch.equal(both.returns, plain.returns)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_distillation_alone_gives_every_token_of_a_branch_its_own_advantage(aggregation: str) -> None:
    weights = torch.tensor([2.0, 4.0, 0.5, 0.25], dtype=torch.float64)
    got = objective("opd", aggregation, reads_teacher=True).with_advantages(batch(), weights)
    shares = [3 / 6, 1.0, 3 / 5, 1.0, 2 / 5, 3 / 6] if aggregation == "seq-mean-token-mean" else [1.0] * 6
    by_rollout = torch.tensor([2.0, 4.0, 0.5, 0.25, 0.5, 2.0], dtype=torch.float64)[:, None]
    torch.testing.assert_close(got.advantages, (TEACHER - OLD) * by_rollout * by_row(shares))


@pytest.mark.parametrize("estimator", ["dr_grpo", "rloo"])
def test_a_branch_has_the_advantage_of_a_rollout_whose_own_row_is_masked(estimator: str) -> None:
    mask = MASK.clone()
    mask[0] = 0
    whole = objective(estimator).with_advantages(batch())
    got = objective(estimator).with_advantages(batch(mask=mask.float()))
    assert not got.advantages[0].any() and not got.returns[0].any()
    assert got.advantages[5].any() and torch.equal(got.advantages[1:], whole.advantages[1:])
    assert torch.equal(got.mask, mask.float())


def test_teacher_metrics_are_a_mean_over_trained_tokens_and_absent_without_a_teacher() -> None:
    gap = [float(o - t) for o, t in zip(OLD[MASK == 1], TEACHER[MASK == 1])]
    for distils in (objective(distill_weight=0.5), objective(reads_teacher=True)):
        assert distils.distills
        found = distils.teacher_metrics(batch())
        assert found["actor/teacher_kl"].result() == pytest.approx(sum(gap) / len(gap))
        assert found["actor/teacher_kl"].merge(Metric.mean(0.0, len(gap))).result() == pytest.approx(
            sum(gap) / (2 * len(gap))
        )
    assert not objective().distills and objective().teacher_metrics(batch()) == {}


TURNS = torch.tensor([[0, -1, 1, 1], [0, 0, -1, -1], [0, 1, 2, -1], [-1, 0, -1, -1]])
TURN_REWARDS = torch.tensor([[1.0, 2.0, 0.0], [0.5, 0.0, 0.0], [0.0, 4.0, 8.0], [3.0, 0.0, 0.0]], dtype=torch.float64)


def with_turns() -> ScoredBatch:
    rows = batch().without_branches()
    return dataclasses.replace(rows, turn_ids=TURNS, turn_rewards=TURN_REWARDS)


@pytest.mark.parametrize("discount", [0.0, 0.5, 1.0])
def test_turns_are_credited_by_the_discounted_rewards_that_follow(discount: float) -> None:
    to_go = [
        [
            sum(discount ** (j - k) * float(TURN_REWARDS[row, j]) for j in range(k, 3))  # 0.0**0 is 1
            for k in range(3)
        ]
        for row in range(4)
    ]
    wanted, returns = torch.zeros(4, 4, dtype=torch.float64), torch.zeros(4, 4, dtype=torch.float64)
    for row in range(4):
        siblings = [other for other in range(3) if other != row] if row < 3 else []
        for t in range(4):
            turn = int(TURNS[row, t])
            if MASK[row, t] and turn >= 0:
                baseline = mean(to_go[other][turn] for other in siblings) if siblings else 0.0
                wanted[row, t], returns[row, t] = to_go[row][turn] - baseline, to_go[row][turn]
    weights = torch.tensor([1.0, 2.0, 3.0, 0.5], dtype=torch.float64)
    got = objective(turn_discount=discount).with_advantages(with_turns(), weights)
    torch.testing.assert_close(got.advantages, wanted * weights[:, None])
    torch.testing.assert_close(got.returns, returns)
    penalties = torch.ones(4, 4, dtype=torch.float64)  # which the rewards of turns have in them already
    again = objective(turn_discount=discount).with_advantages(
        dataclasses.replace(with_turns(), kl_penalties=penalties), weights
    )
    assert torch.equal(again.advantages, got.advantages)


def test_without_turns_or_without_credit_by_turn_the_estimator_decides() -> None:
    for one, rows in (
        (objective(turn_discount=0.5), batch().without_branches()),
        (objective(), with_turns()),
        (objective(turn_discount=0.5), dataclasses.replace(with_turns(), turn_rewards=None)),
    ):
        torch.testing.assert_close(one.with_advantages(rows).advantages, by_row([*CENTRED, 0.0, 0.0])[:4])


def test_a_kl_penalty_by_token_leaves_the_advantage_of_a_whole_response_as_its_score_says() -> None:
    penalties = torch.rand(4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * MASK[:4]
    rows = batch().without_branches()
    got = objective().with_advantages(dataclasses.replace(rows, kl_penalties=penalties))
    torch.testing.assert_close(got.advantages, objective().with_advantages(rows).advantages)


def test_a_kl_penalty_on_the_last_token_is_charged_there_once() -> None:
    """The score lies on the last token of a response even if that is not trained on."""
    penalties = torch.zeros(4, 4, dtype=torch.float64)
    penalties[2] = torch.tensor([0.25, 0.0, 0.5, 0.0])
    seen = []

    def keep(rewards: Tensor, mask: Tensor, group_ids: Tensor, *, values: Tensor | None) -> tuple[Tensor, Tensor]:
        seen.append((rewards, mask, group_ids, values))
        return rewards, rewards

    rows = dataclasses.replace(batch().without_branches(), kl_penalties=penalties, values=TEACHER[:4])
    dataclasses.replace(objective(), advantage=keep).with_advantages(rows)
    ((rewards, mask, group_ids, values),) = seen
    wanted = [[0, 0, 0, 1.0], [0, 0, 0, 0], [-0.25, 0, 0.5 + 0.75 - 0.5, 0], [0, 2.0, 0, 0]]
    torch.testing.assert_close(rewards, torch.tensor(wanted, dtype=torch.float64))
    assert torch.equal(mask, rows.mask) and torch.equal(group_ids, rows.group_ids) and values is rows.values


def test_the_clip_range_follows_every_mini_batch_but_the_first_and_no_other_metric() -> None:
    metrics = {f"actor/pg_clipfrac/mb{i}": Metric.mean(float(i)) for i in (0, 1, 10, 20)}
    metrics |= {"actor/pg_clipfrac_lower/mb1": Metric.mean(500.0), "actor/pg_clipfrac": Metric.mean(700.0)}
    found = objective().observe(metrics)
    assert found["actor/pg_clipfrac_later"].result() == pytest.approx(31 / 3)
    assert {metric.kind for metric in found.values()} == {"last"}


def test_the_saved_state_is_the_factor_of_the_clip_range() -> None:
    one = objective()
    assert one.state_dict() == {"clip": {"factor": 1.0}}
    one.load_state_dict({"clip": {"factor": 2}})
    assert one.clip_range() == pytest.approx((0.2, 0.6)) and one.loss().settings.clip_high == pytest.approx(0.6)


@pytest.mark.parametrize(("fraction", "factor"), [(1.0, 10.0), (0.0, 0.1)])
def test_the_clip_range_stays_within_a_tenth_and_ten_times_by_default(fraction: float, factor: float):
    control = ClipController(0.5)
    for _ in range(50):
        control.observe(None)
        control.observe(fraction)
    assert control.factor == pytest.approx(factor)
