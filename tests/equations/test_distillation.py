"""On-policy distillation: the advantage is the teacher's log-ratio, and its gradient is that of the reverse KL."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from gspo.algo.aggregation import count_totals
from gspo.algo.controllers import ClipController
from gspo.algo.functional import compute_advantage
from gspo.algo.objective import BoundLoss, Objective
from gspo.algo.settings import LossSettings
from gspo.types import LossInputs, ScoredBatch

VOCAB = 7


def objective(**changes: object) -> Objective:
    def no_reward(rewards: Tensor, mask: Tensor, group_ids: Tensor, **options: Tensor) -> tuple[Tensor, Tensor]:
        return compute_advantage("opd" if "ref_log_probs" in options else "grpo", rewards, mask, group_ids, **options)

    settings = LossSettings(clip_low=0.2, clip_high=0.2, aggregation="token-mean")
    return Objective("vanilla", settings, no_reward, ClipController(None, (0.1, 10.0)), **changes)  # type: ignore[arg-type]


def batch(old: Tensor, teacher: Tensor, mask: Tensor, scores: Tensor | None = None) -> ScoredBatch:
    rows, width = mask.shape
    return ScoredBatch(
        prompt_ids=[(0,)] * rows,
        response_ids=[(0,) * width] * rows,
        mask=mask,
        group_ids=torch.zeros(rows, dtype=torch.int64),
        scores=torch.zeros(rows, dtype=torch.float64) if scores is None else scores,
        rollout_log_probs=old,
        ref_log_probs=teacher,
        old_log_probs=old,
        entropy=None,
        unscored_rows=(),
    )


def test_the_advantage_of_a_token_is_how_much_more_the_teacher_likes_it() -> None:
    old, teacher = torch.tensor([[-1.0, -2.0, -3.0]]), torch.tensor([[-1.5, -0.5, -9.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0]])
    distilled = objective(reads_teacher=True)
    got = distilled.with_advantages(batch(old, teacher, mask))
    torch.testing.assert_close(got.advantages, torch.tensor([[-0.5, 1.5, 0.0]], dtype=torch.float64))
    assert distilled.teacher_metrics(got)["actor/teacher_kl"].result() == pytest.approx((0.5 - 1.5) / 2)


def test_it_is_added_to_a_reward_with_its_weight() -> None:
    old, teacher = torch.full((2, 2), -1.0), torch.tensor([[-1.5, -0.5], [-1.0, -3.0]])
    scores = torch.tensor([1.0, 0.0], dtype=torch.float64)
    plain = objective().with_advantages(batch(old, teacher, torch.ones(2, 2), scores)).advantages
    both = objective(distill_weight=0.25).with_advantages(batch(old, teacher, torch.ones(2, 2), scores)).advantages
    torch.testing.assert_close(both - plain, 0.25 * (teacher - old).double())


def test_the_expected_gradient_is_minus_that_of_the_reverse_kl() -> None:
    """Over every token v, drawn with π(v): Σ_v π(v)·A_v·∇log π(v) = -∇ KL(π ‖ π_teacher)."""
    torch.manual_seed(0)
    logits = torch.randn(VOCAB, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(VOCAB, dtype=torch.float64).log_softmax(-1)
    policy = logits.log_softmax(-1)
    kl = (policy.exp() * (policy - teacher)).sum()
    (closed,) = torch.autograd.grad(kl, logits, retain_graph=True)

    log_probs, mask = policy[:, None], torch.ones(VOCAB, 1, dtype=torch.float64)  # one response of one token per v
    scored = batch(log_probs.detach(), teacher[:, None], mask)
    advantages = objective(reads_teacher=True).with_advantages(scored).advantages
    weights = policy.detach().exp()[:, None]
    x = LossInputs(
        log_probs=log_probs,
        old_log_probs=log_probs.detach(),
        advantages=advantages * weights * VOCAB,  # the mean over all tokens becomes an expectation
        mask=mask,
        totals=count_totals(mask),
    )
    loss = BoundLoss("vanilla", LossSettings(clip_low=0.2, clip_high=0.2, aggregation="token-mean"))(x).loss
    (got,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(got, closed, rtol=1e-10, atol=1e-12)


def test_opd_without_a_teacher_is_refused() -> None:
    with pytest.raises(ValueError, match="needs old_log_probs and ref_log_probs"):
        compute_advantage("opd", torch.zeros(1, 2), torch.ones(1, 2), torch.zeros(1, dtype=torch.int64))
