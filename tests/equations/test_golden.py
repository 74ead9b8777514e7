"""The reference numbers of GSPO on three short sequences."""

from __future__ import annotations

import pytest
import torch

from gspo.algo import compute_policy_loss
from gspo.algo.ratios import masked_log_ratio, sequence_ratio
from tests.equations.loss_reference import Case

GOLDEN = Case(
    new=[[-0.999, -0.5005, -1.9985], [-0.3012, -0.7004], [-1.2001, -0.4, -0.9002, -0.1]],
    old=[[-1.0, -0.5, -2.0], [-0.3, -0.7], [-1.2, -0.4, -0.9, -0.1]],
    adv=[1.0, -1.0, -0.5],
)


def run(**kw):
    tensors = GOLDEN.tensors()
    del tensors["rollout_log_probs"]
    tensors["log_probs"].requires_grad_()
    loss, metrics = compute_policy_loss("gspo", **tensors, **kw)
    loss.backward()
    return loss.item(), metrics, tensors["log_probs"].grad


def test_sequence_ratios():
    x = GOLDEN.tensors(fill=0.0)
    mask = x["response_mask"].bool()
    ratio = sequence_ratio(masked_log_ratio(x["log_probs"], x["old_log_probs"], mask), mask).flatten()
    assert ratio.tolist() == pytest.approx([1.00066689, 0.99920032, 0.99992500], abs=5e-9)


@pytest.mark.filterwarnings("ignore:loss_agg_mode")
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (None, 0.16642083),
        ("seq-mean-token-mean", 0.16642083),
        ("token-mean", 0.11089445),
        ("seq-mean-token-sum", 0.33268334),
    ],
)
def test_loss(mode, expected):
    loss, metrics, _ = run(loss_agg_mode=mode)
    assert loss == pytest.approx(expected, abs=5e-9)
    assert metrics["actor/pg_loss"] == loss


def test_gradient_is_zero_on_clipped_rows():
    _, _, grad = run()
    assert torch.equal(grad[:2], torch.zeros_like(grad[:2]))
    assert grad[2].tolist() == pytest.approx([0.0416635] * 4, abs=5e-8)


def test_metrics():
    _, metrics, _ = run()
    assert metrics["actor/pg_clipfrac_token"] == pytest.approx(0.5556, abs=5e-5)
    assert metrics["actor/pg_clipfrac"] == pytest.approx(2 / 3)
    assert metrics["actor/pg_clipfrac_upper"] == pytest.approx(1 / 3)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(1 / 3)
    assert metrics["actor/seq_importance_ratio/min"] == pytest.approx(0.99920032, abs=5e-9)
    assert metrics["actor/seq_importance_ratio/max"] == pytest.approx(1.00066689, abs=5e-9)
    assert metrics["actor/seq_importance_ratio"] == pytest.approx((1.00066689 + 0.99920032 + 0.999925) / 3, abs=5e-9)
    assert metrics["actor/ppo_kl"] == pytest.approx(-0.0001 / 9, rel=1e-9)
