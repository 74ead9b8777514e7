"""The KL penalty of the reward: what each response pays, what a batch is scored by, and how β moves and resumes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gspo.algo.kl import AdaptiveController, FixedController
from gspo.training.batch.batching import collate
from gspo.training.kl_reward import KlScorer
from gspo.types import Group, Prompt, Reward, Rollout, TrainBatch

MASK = (0, 1, 1)


def rollout(first: int, score: float | None) -> Rollout:
    reward = None if score is None else Reward(score, acc=score)
    return Rollout((first, 2, 3), (-1.0,) * 3, MASK, (0,) * 3, "stop", reward=reward)


def group(*scores: float | None) -> Group:
    """Response i begins with token 10 + i, by which the models below tell it apart."""
    rollouts = tuple(rollout(10 + i, score) for i, score in enumerate(scores))
    return Group(Prompt("p", (), (1,)), rollouts, 0, 0)


class Inner:
    """Returns what was submitted, scored already."""

    def __init__(self) -> None:
        self.groups: list[Group] = []

    def submit(self, group: Group) -> None:
        self.groups.append(group)

    def collect(self, num: int | None = None) -> list[Group]:
        groups, self.groups = self.groups[:num], [] if num is None else self.groups[num:]
        return groups

    def close(self) -> None: ...


class Model:
    """Log-probs that grow with the first token of a response, in `by` steps."""

    def __init__(self, by: float) -> None:
        self.by = by

    def of(self, batch: TrainBatch) -> torch.Tensor:
        first = torch.tensor([[float(ids[0] - 9)] for ids in batch.response_ids])
        return -2.0 + self.by * first.expand(batch.mask.shape)


class Policy(Model):
    def log_probs(self, batch: TrainBatch):
        return self.of(batch), torch.zeros_like(batch.mask)


class Reference(Model):
    def log_probs(self, batch: TrainBatch):
        return self.of(batch)


def scorer(controller=None) -> KlScorer:
    return KlScorer(Inner(), Policy(0.5), Reference(0.1), controller or FixedController(0.5), "k1")


def scored(of: KlScorer, *groups: Group) -> list[Group]:
    for each in groups:
        of.submit(each)
    return of.collect()


def test_each_response_pays_beta_times_its_own_kl():
    """log π - log π_ref is 0.4·(i + 1) on each of the two trained tokens of response i."""
    (got,) = scored(scorer(), group(1.0, None, 0.0))
    first, failed, last = got.rollouts
    assert failed.reward is None
    assert first.reward.kl_penalty == pytest.approx(0.5 * 0.8)
    assert last.reward.kl_penalty == pytest.approx(0.5 * 3 * 0.8)
    assert [kl for kl in first.reward.kl_by_token if kl] == pytest.approx([0.5 * 0.4] * 2)
    assert [kl for kl in last.reward.kl_by_token if kl] == pytest.approx([0.5 * 3 * 0.4] * 2)
    assert (first.reward.score, first.reward.acc) == (1.0, 1.0)
    assert (first.reward.final, last.reward.final) == pytest.approx((0.6, -1.2))


def test_each_token_pays_its_own_part_and_a_short_response_has_no_other():
    """Responses of 3 and 2 tokens in one group; the first token of each is not trained on."""
    whole = group(1.0, 0.0)
    short = dataclasses.replace(whole.rollouts[1], token_ids=(11, 2), log_probs=(-1.0,) * 2, loss_mask=(0, 1))
    kl = scorer()
    (got,) = scored(kl, whole.with_rollouts((whole.rollouts[0], short)))
    first, last = (r.reward for r in got.rollouts)
    assert first.kl_by_token == pytest.approx((0.0, 0.2, 0.2)) and first.kl_penalty == pytest.approx(0.4)
    assert last.kl_by_token == pytest.approx((0.0, 0.4)) and last.kl_penalty == pytest.approx(0.4)
    assert kl.observe()["actor/reward_kl_penalty"].result() == pytest.approx((2 * 0.4 + 0.8) / 3)  # before β


def test_groups_that_are_left_and_the_end_belong_to_the_inner_scorer():
    kl = scorer()
    for score in (1.0, 0.0):
        kl.submit(group(score))
    assert len(kl.collect(1)) == 1 and len(kl.inner.groups) == 1
    closed = []
    kl.inner.close = lambda: closed.append(True)
    kl.close()
    assert closed == [True]


def test_beta_of_the_next_step_applies_to_the_groups_after_it_alone():
    controller = AdaptiveController(0.1, target=0.1, horizon=10)
    kl = scorer(controller)
    (before,) = scored(kl, group(1.0))
    kl.observe()
    (after,) = scored(kl, group(1.0))
    assert before.rollouts[0].reward.kl_penalty == pytest.approx(0.1 * 0.8)
    assert after.rollouts[0].reward.kl_penalty == pytest.approx(0.1 * (1 + 0.2 * 1 / 10) * 0.8)


def test_a_batch_is_scored_by_the_reward_after_the_penalty():
    (got,) = scored(scorer(), group(1.0, 0.0))
    assert collate([got]).scores.tolist() == pytest.approx([1.0 - 0.4, 0.0 - 0.8])


def test_beta_follows_the_mean_over_tokens_of_one_step():
    controller = AdaptiveController(0.1, target=1.0, horizon=10)
    kl = scorer(controller)
    scored(kl, group(1.0, 0.0, None), group(None, None), group(1.0))
    # Σ KL = 0.8 + 1.6 + 0.8 over 6 trained tokens of 3 scored responses; below the target by more than 20 %.
    metrics = kl.observe()
    assert metrics["actor/reward_kl_penalty"].result() == pytest.approx(3.2 / 6)
    assert metrics["actor/reward_kl_penalty_coeff"].result() == 0.1
    assert controller.value == pytest.approx(0.1 * (1 - 0.2 * 3 / 10))
    assert set(kl.observe()) == {"actor/reward_kl_penalty_coeff"}  # nothing since
    scored(kl, group(1.0))
    assert kl.observe()["actor/reward_kl_penalty"].result() == pytest.approx(0.4)


def test_a_step_that_is_saved_half_way_goes_on():
    a, b = (scorer(AdaptiveController(0.1, target=0.01, horizon=10)) for _ in range(2))
    scored(a, group(1.0, 0.0))
    a.observe()
    scored(a, group(1.0, 0.0))
    b.load_state_dict(a.state_dict())
    for each in (a, b):
        scored(each, group(1.0))
    assert {k: m.result() for k, m in a.observe().items()} == {k: m.result() for k, m in b.observe().items()}
    assert a.controller.value == b.controller.value != 0.1
    assert a.state_dict() == b.state_dict()


def test_beta_moves_by_the_responses_of_its_own_step_alone():
    controller = AdaptiveController(0.1, target=0.01, horizon=10)
    kl = scorer(controller)
    value = 0.1
    for num in (3, 1, 0, 2):  # in the third step nothing was scored
        scored(kl, group(*[1.0] * num, None))
        kl.observe()
        value *= 1 + 0.2 * num / 10
        assert controller.value == pytest.approx(value, rel=1e-12)


def test_a_branch_is_measured_and_its_rollout_pays_for_its_own_tokens():
    """The first response has a branch of two trained tokens, whose first token is 12: 0.4 · 3 on each of them."""
    branch = dataclasses.replace(rollout(12, None), context=(7, 7))
    whole = group(1.0, 0.0)
    first = dataclasses.replace(whole.rollouts[0], branches=(branch,), reward=Reward(1.0, kl_penalty=9.0))
    kl = scorer()
    (got,) = scored(kl, whole.with_rollouts((first, whole.rollouts[1])))
    assert [r.reward.kl_penalty for r in got.rollouts] == pytest.approx([0.5 * 0.8, 0.5 * 1.6])
    assert got.rollouts[1].reward.kl_by_token == pytest.approx((0.0, 0.4, 0.4))
    assert got.rollouts[0].branches == (branch,)
    assert kl.observe()["actor/reward_kl_penalty"].result() == pytest.approx((0.8 + 1.6 + 2.4) / 6)
