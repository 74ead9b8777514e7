"""KL estimators against closed forms, the KL terms, and the controllers."""

from __future__ import annotations

import math

import pytest
import torch

from gspo.algo import AdaptiveController, FixedController, kl_penalty, make_controller
from gspo.algo.kl import kl_loss, token_kl
from gspo.algo.objective import BoundRegulariser
from gspo.training.kl_reward import KlScorer
from gspo.types import BatchTotals, Group, Prompt, Reward, Rollout

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


@pytest.mark.parametrize("kind", ["k1+", "k3+"])
def test_a_plus_has_the_value_of_its_kind_and_the_gradient_of_k2(kind):
    new = NEW.clone().requires_grad_()
    value = kl_penalty(kind, new, REF)
    assert value[0].tolist() == pytest.approx(kl_penalty(kind[:-1], NEW, REF)[0].tolist(), abs=1e-15)
    value.sum().backward()
    assert new.grad is not None and new.grad[0].tolist() == pytest.approx(D, abs=1e-15)  # of d²/2: d


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


def test_k3_is_held_at_10_and_then_has_no_gradient():
    """d = -2.4 and 10.9 stay below 10, d = -2.7 and 11.1 would not."""
    for d, free in ((-2.4, True), (10.9, True), (-2.7, False), (11.1, False), (30.0, False)):
        new = torch.tensor(d, dtype=torch.float64, requires_grad=True)
        value = kl_penalty("k3", new, torch.zeros((), dtype=torch.float64))
        value.backward()
        exact = math.exp(-d) + d - 1
        assert (exact < 10) == free and value.item() == pytest.approx(min(exact, 10.0), rel=1e-12)
        assert new.grad.item() == pytest.approx(1 - math.exp(-d) if free else 0.0, rel=1e-12)
        held = kl_penalty("low_var_kl", torch.tensor(d, dtype=torch.float64), torch.zeros((), dtype=torch.float64))
        assert held.item() == value.item()


def test_k3_with_a_plus_learns_even_where_its_value_is_held():
    new = torch.tensor([30.0, -30.0], dtype=torch.float64, requires_grad=True)
    value = kl_penalty("k3+", new, torch.zeros(2, dtype=torch.float64))
    value.sum().backward()
    assert value.tolist() == [10.0, 10.0] and new.grad.tolist() == [30.0, -30.0]


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
            kl_loss("k3", new[rows], ref[rows], mask[rows], totals, aggregation) for rows in (slice(0, 1), slice(1, 4))
        ]
        assert sum(part.loss for part in parts).item() == pytest.approx(whole.loss.item(), rel=1e-13)
        merged = parts[0].metrics["actor/kl_loss"].merge(parts[1].metrics["actor/kl_loss"])
        assert merged.result() == pytest.approx(whole.loss.item(), rel=1e-13)
    expected = sum(math.exp(-d) + d - 1 for d in (new - ref)[mask.bool()].tolist()) / 6
    assert kl_loss("k3", new, ref, mask, totals, "token-mean").loss.item() == pytest.approx(expected, rel=1e-12)


def test_the_regulariser_is_the_weighted_kl_term_minus_the_weighted_entropy():
    """Value and gradient of kl_coef·KL - entropy_coeff·H in the loss; what is masked reaches neither."""
    new = torch.tensor([[-1.0, -2.5, -0.3], [-0.7, 0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([[-1.2, -1.5, float("nan")], [-0.5, float("nan"), 0.0]], dtype=torch.float64)
    entropy = torch.tensor([[1.0, 3.0, float("inf")], [5.0, 0.0, 0.0]], dtype=torch.float64)
    entropy.requires_grad_()
    ref.requires_grad_()
    mask, totals = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]), BatchTotals(6, 4)
    both = BoundRegulariser("token-mean", kl_coef=0.3, kl_kind="k2", entropy_coeff=0.05)
    out = both(new, ref, entropy, mask, totals)
    kl = (0.2**2 / 2 + 1.0**2 / 2 + 0.2**2 / 2) / 6
    assert out.loss.item() == pytest.approx(0.3 * kl - 0.05 * 9 / 6, rel=1e-12)
    assert out.metrics["actor/kl_loss"].result() == pytest.approx(2 * kl)  # of 3 of the 6 tokens
    assert out.metrics["actor/kl_coef"].result() == 0.3
    out.loss.backward()
    assert new.grad.flatten().tolist() == pytest.approx([0.01, -0.05, 0, -0.01, 0, 0], abs=1e-15)
    assert entropy.grad.flatten().tolist() == pytest.approx([-0.05 / 6, -0.05 / 6, 0, -0.05 / 6, 0, 0])
    assert ref.grad is None  # the reference is frozen


def test_the_regulariser_has_only_the_terms_that_are_on():
    mask, totals = torch.ones_like(NEW), BatchTotals(3, 1)
    by_length = {"aggregation": "seq-mean-token-sum-norm", "norm_length": 10}
    assert BoundRegulariser("token-mean")(NEW, REF, NEW, mask, totals) is None
    assert BoundRegulariser("token-mean", kl_coef=1.0)(NEW, None, NEW, mask, totals) is None
    kl = BoundRegulariser(**by_length, kl_coef=1.0, kl_kind="abs")(NEW, REF, None, mask, totals)
    assert kl.loss.item() == pytest.approx(1.2 / 10)
    entropy = BoundRegulariser(**by_length, entropy_coeff=2.0)(NEW, REF, -NEW, mask, totals)
    assert entropy.loss.item() == pytest.approx(-2 * 3.8 / 10) and entropy.metrics == {}


def test_entropy_alone_needs_no_reference_and_kl_alone_no_entropy():
    mask, totals = torch.ones_like(NEW), BatchTotals(3, 1)
    both = BoundRegulariser("token-mean", kl_coef=0.5, kl_kind="k1", entropy_coeff=2.0)
    entropy_only, kl_only = both(NEW, None, -NEW, mask, totals), both(NEW, REF, None, mask, totals)
    assert entropy_only.loss.item() == pytest.approx(-2 * 3.8 / 3) and entropy_only.metrics == {}
    assert kl_only.loss.item() == pytest.approx(0.5 * -0.8 / 3)
    assert both(NEW, None, None, mask, totals) is None
    assert BoundRegulariser("token-mean").kl_kind == "low_var_kl"


def test_both_terms_divide_by_the_totals_and_the_fixed_length():
    mask, totals = torch.tensor([[1.0, 1.0, 0.0]]), BatchTotals(8, 4)
    settings = {"kl_coef": 0.5, "kl_kind": "k1", "entropy_coeff": 2.0}
    for aggregation, divide in (("seq-mean-token-sum-norm", 4 * 5), ("seq-mean-token-mean", 2 * 4), ("token-sum", 1)):
        out = BoundRegulariser(aggregation, 5.0, **settings)(NEW, REF, -NEW, mask, totals)
        assert out.loss.item() == pytest.approx((0.5 * -0.8 - 2.0 * 3.5) / divide)


def test_kl_of_tokens():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    new, ref = torch.cat([NEW, NEW]), torch.cat([REF, REF])
    ref[mask == 0] = float("nan")
    kl_BT = token_kl("k1", new.requires_grad_(), ref, mask)
    assert not kl_BT.requires_grad  # a reward has no gradient
    assert kl_BT.dtype == torch.float64 and kl_BT.sum(-1).tolist() == pytest.approx([-0.8, 0.2])
    assert kl_BT[mask == 0].tolist() == [0.0, 0.0, 0.0]
    assert token_kl("k1", new.detach().float(), ref.float(), mask).dtype == torch.float64


class _Scored:
    """Collects one group as it is."""

    def __init__(self, group: Group) -> None:
        self.group = group

    def collect(self, num: int | None = None) -> list[Group]:
        return [self.group]


class _LogProbs:
    """A policy or reference that gives the same log-probs for every row."""

    def __init__(self, of_row: torch.Tensor, *beside: None) -> None:
        self.of_row, self.beside = of_row, beside

    def log_probs(self, batch):
        found = self.of_row.expand(batch.num_sequences, -1)[:, : batch.mask.shape[1]]
        return (found, *self.beside) if self.beside else found


def test_kl_in_the_reward_is_what_a_response_pays_and_what_moves_its_coefficient():
    """Reward - β·Σ_t KL_t over trained tokens; the controller sees the mean per token; a failed reward pays nothing."""

    def rollout(mask: tuple[int, ...], reward: Reward | None) -> Rollout:
        size = len(mask)
        return Rollout((7,) * size, (-1.0,) * size, mask, (0,) * size, "stop", reward=reward)

    rollouts = (rollout((1, 1, 0), Reward(1.0)), rollout((1, 1, 1), None), rollout((1,), Reward(0.5)))
    group = Group(Prompt("p", (), (1, 2)), rollouts, 0, 0)
    beta = AdaptiveController(0.1, target=0.1, horizon=100)
    scorer = KlScorer(_Scored(group), _LogProbs(NEW, None), _LogProbs(REF), beta, "abs")
    first, failed, last = scorer.collect()[0].rollouts
    assert (first.reward.score, first.reward.final) == (1.0, pytest.approx(1.0 - 0.1 * 1.2))
    assert failed is rollouts[1]
    assert last.reward.final == pytest.approx(0.5 - 0.1 * 0.2)
    metrics = scorer.observe()
    assert metrics["actor/reward_kl_penalty"].result() == pytest.approx(1.4 / 3)
    assert metrics["actor/reward_kl_penalty_coeff"].result() == 0.1
    assert beta.value == pytest.approx(0.1 * (1 + 0.2 * 2 / 100))


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
        for key, name in (("target", "target_kl"), ("horizon", "horizon")):
            for value in (0, -1.0, math.nan):
                with pytest.raises(ValueError, match=f"kl_ctrl.{name}={value}"):
                    make_controller("adaptive", 0.1, **{key: value})
        make_controller("fixed", 0.1, target=0, horizon=0)  # which a constant does not read

    def test_an_adaptive_controller_aims_at_a_tenth_over_ten_thousand_sequences_by_default(self):
        controller = make_controller("adaptive", 1.0)
        controller.update(0.11, 500)
        assert controller.value == pytest.approx(1 + 0.1 * 500 / 10_000, rel=1e-12)
        controller.update(0.11, 500)
        assert controller.value == pytest.approx((1 + 0.1 * 500 / 10_000) ** 2, rel=1e-12)

    @pytest.mark.parametrize("kind", ["fixed", "adaptive"])
    def test_what_is_saved_is_the_coefficient(self, kind):
        controller = make_controller(kind, 0.3)
        assert controller.state_dict() == {"value": 0.3}
        controller.load_state_dict({"value": 2})
        assert controller.value == 2.0 and isinstance(controller.value, float)


def test_kl_penalty_of_the_same_policy_is_zero():
    for kind in ("k1", "abs", "k2", "k3"):
        assert torch.equal(kl_penalty(kind, NEW, NEW), torch.zeros_like(NEW))
