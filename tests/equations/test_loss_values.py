"""Every loss under every aggregation against plain-Python values and closed-form gradients."""

from __future__ import annotations

import pytest
import torch

from gspo.algo import LossSettings, compute_policy_loss, count_totals, get_policy_loss
from gspo.types import LossInputs
from tests.equations.loss_reference import (
    AGGREGATIONS,
    DEFAULTS,
    LOSSES,
    Case,
    loss_and_gradient,
    random_case,
    spread_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:loss_agg_mode")


def run(loss: str, case: Case, **kw):
    tensors = case.tensors()
    del tensors["rollout_log_probs"]
    tensors["log_probs"].requires_grad_()
    value, metrics = compute_policy_loss(loss, **tensors, **kw)
    value.backward()
    gradient = tensors["log_probs"].grad
    assert gradient is not None
    padding = gradient[tensors["response_mask"] == 0]
    assert torch.equal(padding, torch.zeros_like(padding))
    return value.item(), [row[: len(new)].tolist() for row, new in zip(gradient, case.new)], metrics


def assert_close(actual: list[list[float]], expected: list[list[float]]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a == pytest.approx(e, rel=1e-10, abs=1e-14)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("aggregation", [None, *AGGREGATIONS])
@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_gradient(loss, aggregation, seed):
    case = random_case(seed, spread_of(loss))
    value, gradient, _ = run(loss, case, loss_agg_mode=aggregation, loss_norm_length=11.0)
    expected, expected_gradient = loss_and_gradient(loss, case, aggregation=aggregation, norm_length=11.0)
    assert value == pytest.approx(expected, rel=1e-10)
    assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("loss", LOSSES)
def test_cases_reach_both_sides_of_the_clip(loss):
    """Otherwise the comparison above would prove little."""
    seen = {"lower": 0.0, "upper": 0.0, "inside": 0.0}
    for seed in range(4):
        _, _, metrics = run(loss, random_case(seed, spread_of(loss)))
        seen["lower"] += metrics["actor/pg_clipfrac_lower"]
        seen["upper"] += metrics["actor/pg_clipfrac_upper"]
        seen["inside"] += 1 - metrics["actor/pg_clipfrac"]
    assert all(count > 0 for count in seen.values()), seen


@pytest.mark.parametrize("loss", [name for name in LOSSES if name != "sapo"])
def test_clip_range_is_honoured(loss):
    scale = spread_of(loss)
    case = random_case(5, scale)
    value, gradient, _ = run(loss, case, clip_ratio_low=0.3 * scale, clip_ratio_high=0.9 * scale)
    expected, expected_gradient = loss_and_gradient(loss, case, low=0.3 * scale, high=0.9 * scale)
    assert value == pytest.approx(expected, rel=1e-10)
    assert value != pytest.approx(run(loss, case)[0], rel=1e-6)
    assert_close(gradient, expected_gradient)


@pytest.mark.parametrize("loss", LOSSES)
def test_defaults(loss):
    resolved = get_policy_loss(loss).resolve(LossSettings())
    assert (resolved.clip_low, resolved.clip_high, resolved.aggregation) == DEFAULTS[loss]


@pytest.mark.parametrize("loss", [name for name in LOSSES if name not in ("gspo_token", "cispo")])
def test_autograd_agrees_with_finite_differences(loss):
    """Guards the closed forms themselves; the two losses left out stop a gradient, so the value's slope differs."""
    case = random_case(9, spread_of(loss), num_rows=3, empty=False)
    tensors = case.tensors(fill=0.0)
    del tensors["rollout_log_probs"]
    log_probs = tensors.pop("log_probs").requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x: compute_policy_loss(loss, x, **tensors)[0], (log_probs,), eps=1e-7, atol=1e-6
    )


class TestDualClip:
    """One token, A = -1, ratio e² ≈ 7.39: the surrogate would be 7.39, the dual clip holds it at c."""

    CASE = Case(new=[[-1.0]], old=[[-3.0]], adv=[-1.0])

    @pytest.mark.parametrize("loss", ["vanilla", "dapo"])
    @pytest.mark.parametrize("c", [2.0, 3.0])
    def test_bounds_loss_and_stops_gradient(self, loss, c):
        value, gradient, metrics = run(loss, self.CASE, clip_ratio_c=c)
        assert value == c
        assert gradient == [[0.0]]
        assert metrics["actor/pg_clipfrac_dual"] == 1.0
        assert metrics["actor/pg_clipfrac"] == 0.0

    def test_off(self):
        value, gradient, metrics = run("vanilla", self.CASE, clip_ratio_c=None)
        assert value == pytest.approx(7.38905609893065)
        assert gradient == [[pytest.approx(7.38905609893065)]]
        assert "actor/pg_clipfrac_dual" not in metrics

    def test_leaves_positive_advantages_alone(self):
        value, _, _ = run("vanilla", Case(new=[[-1.0]], old=[[-3.0]], adv=[1.0]), clip_ratio_high=9.0)
        assert value == pytest.approx(-7.38905609893065)

    def test_gspo_has_none(self):
        value, _, _ = run("gspo", self.CASE)
        assert value == pytest.approx(7.38905609893065)


def test_sapo_temperatures_act():
    case = random_case(3, 0.5)
    tensors = case.tensors(fill=0.0)
    mask = tensors["response_mask"]
    x = LossInputs(
        tensors["log_probs"],
        tensors["old_log_probs"],
        tensors["advantages"].unsqueeze(-1).expand(mask.shape),
        mask,
        count_totals(mask),
    )
    sapo = get_policy_loss("sapo")
    base = sapo(x).loss.item()
    assert sapo(x, LossSettings(tau_pos=2.0)).loss.item() != pytest.approx(base)
    assert sapo(x, LossSettings(tau_neg=2.0)).loss.item() != pytest.approx(base)


def test_gradient_of_sapo_at_ratio_one_is_that_of_the_surrogate():
    case = random_case(1, 0.0)
    soft, hard = run("sapo", case), run("vanilla", case, loss_agg_mode="seq-mean-token-mean")
    assert_close(soft[1], hard[1])
