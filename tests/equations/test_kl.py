"""KL estimators against closed forms, the KL terms, and the controllers."""

from __future__ import annotations

import math

import pytest
import torch

from gspo.algo import AdaptiveController, FixedController, kl_penalty, make_controller
from gspo.algo.kl import kl_loss, penalise_rewards
from gspo.types import BatchTotals

NEW = torch.tensor([[-1.0, -2.5, -0.3]], dtype=torch.float64)
REF = torch.tensor([[-1.2, -1.5, -0.3]], dtype=torch.float64)
D = [0.2, -1.0, 0.0]


@pytest.mark.parametrize(
    ("kinds", "formula"),
    [
        (("k1", "kl"), lambda d: d),
        (("abs",), abs),
        (("k2", "mse"), lambda d: d * d / 2),
        (("k3", "low_var_kl"), lambda d: math.exp(-d) + d - 1),
    ],
)
def test_kinds(kinds, formula):
    for kind in kinds:
        assert kl_penalty(kind, NEW, REF)[0].tolist() == pytest.approx([formula(d) for d in D], abs=1e-15)


def test_unknown_kind_is_named():
    with pytest.raises(ValueError, match=r"'k9'.*low_var_kl"):
        kl_penalty("k9", NEW, REF)


def test_k1_and_k3_average_to_the_exact_kl_of_a_categorical():
    """E_π[estimate] over a whole small vocabulary equals Σ π log(π/ref); k3 holds where nothing is clamped."""
    policy = torch.tensor([0.5, 0.3, 0.15, 0.05], dtype=torch.float64)
    reference = torch.tensor([0.4, 0.2, 0.2, 0.2], dtype=torch.float64)
    exact = (policy * (policy / reference).log()).sum().item()
    for kind in ("k1", "k3"):
        estimate = (policy * kl_penalty(kind, policy.log(), reference.log())).sum().item()
        assert estimate == pytest.approx(exact, rel=1e-12)


def test_k3_clamps_and_stays_finite():
    new = torch.tensor([-1000.0, 0.0, -60.0], requires_grad=True)
    ref = torch.tensor([0.0, -1000.0, 0.0])
    value = kl_penalty("k3", new, ref)
    value.sum().backward()
    assert value.tolist() == [10.0, 10.0, 10.0]
    assert new.grad.isfinite().all()


def test_k3_keeps_its_digits_near_zero():
    d = torch.tensor(1e-5, dtype=torch.float32)
    assert kl_penalty("k3", d, torch.zeros(())).item() == pytest.approx(5e-11, rel=0.02)


def test_k3_gradient():
    new = NEW.clone().requires_grad_()
    kl_penalty("k3", new, REF).sum().backward()
    assert new.grad[0].tolist() == pytest.approx([1 - math.exp(-d) for d in D], abs=1e-15)


def test_kl_loss_adds_up_over_micro_batches_and_ignores_padding():
    generator = torch.Generator().manual_seed(0)
    new, ref = (0.3 * torch.randn(4, 3, dtype=torch.float64, generator=generator) for _ in range(2))
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [0, 0, 0], [1, 1, 0]])
    ref[mask == 0] = float("nan")
    totals = BatchTotals(6, 3)
    for aggregation in ("token-mean", "seq-mean-token-mean"):
        whole = kl_loss("k3", new, ref, mask, totals, aggregation)
        parts = [
            kl_loss("k3", new[rows], ref[rows], mask[rows], totals, aggregation)
            for rows in (slice(0, 1), slice(1, 4))
        ]
        assert sum(part.loss for part in parts).item() == pytest.approx(whole.loss.item(), rel=1e-13)
        merged = parts[0].metrics["actor/kl_loss"].merge(parts[1].metrics["actor/kl_loss"])
        assert merged.result() == pytest.approx(whole.loss.item(), rel=1e-13)
    expected = sum(math.exp(-d) + d - 1 for d in (new - ref)[mask.bool()].tolist()) / 6
    assert kl_loss("k3", new, ref, mask, totals, "token-mean").loss.item() == pytest.approx(
        expected, rel=1e-12
    )


def test_kl_in_reward():
    mask = torch.tensor([[1, 1, 0]])
    scores = torch.tensor([[0.0, 1.0, 0.0]], dtype=torch.float64)
    rewards, mean_kl = penalise_rewards("k1", scores, NEW, REF, mask, 0.1)
    assert rewards[0].tolist() == pytest.approx([-0.02, 1.1, 0.0])
    assert mean_kl.item() == pytest.approx(-0.4)


class TestControllers:
    def test_fixed_never_moves(self):
        controller = FixedController(0.05)
        controller.update(100.0, 512)
        assert controller.value == 0.05

    @pytest.mark.parametrize(("kl", "error"), [(0.11, 0.1), (1.0, 0.2), (0.0, -0.2), (0.1, 0.0)])
    def test_adaptive_follows_its_formula(self, kl, error):
        controller = AdaptiveController(0.2, target=0.1, horizon=1000)
        controller.update(kl, 50)
        assert controller.value == pytest.approx(0.2 * (1 + error * 50 / 1000), rel=1e-12)

    @pytest.mark.parametrize("kind", ["fixed", "adaptive"])
    def test_state_resumes_to_the_bit(self, kind):
        first = make_controller(kind, 0.3, target=0.1, horizon=777)
        for kl in (0.3, 0.05, 0.123):
            first.update(kl, 64)
        second = make_controller(kind, 0.3, target=0.1, horizon=777)
        second.load_state_dict(first.state_dict())
        for controller in (first, second):
            controller.update(0.07, 64)
        assert second.value == first.value
        assert (first.value == 0.3) == (kind == "fixed")

    def test_bad_settings_are_named(self):
        with pytest.raises(ValueError, match=r"kl_ctrl.type='linear'"):
            make_controller("linear", 0.1)
        with pytest.raises(ValueError, match="target_kl=0"):
            make_controller("adaptive", 0.1, target=0)


def test_kl_penalty_of_the_same_policy_is_zero():
    for kind in ("k1", "abs", "k2", "k3"):
        assert torch.equal(kl_penalty(kind, NEW, NEW), torch.zeros_like(NEW))
