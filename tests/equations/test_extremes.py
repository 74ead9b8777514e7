"""Ratios far from 1, at the edge of the clip range, and rows without trained tokens: values and metrics."""

from __future__ import annotations

import math

import pytest
import torch

from gspo.algo import Behaviour, LossSettings, compute_policy_loss, count_totals, get_policy_loss
from gspo.algo.ratios import importance_ratio
from gspo.types import LossInputs
from tests.equations.loss_reference import Case

pytestmark = pytest.mark.filterwarnings("ignore:loss_agg_mode")


def run(loss: str, case: Case, behaviour: bool = False, **options):
    tensors = case.tensors()
    if not behaviour:
        del tensors["rollout_log_probs"]
    tensors["log_probs"].requires_grad_()
    value, metrics = compute_policy_loss(loss, **tensors, **options)
    value.backward()
    return value.item(), tensors["log_probs"].grad, metrics


def one_token(log_ratio: float, adv: float) -> Case:
    return Case(new=[[log_ratio - 30.0]], old=[[-30.0]], adv=[adv])


@pytest.mark.parametrize(
    ("loss", "limit"), [("vanilla", 20.0), ("kl_cov", 20.0), ("gspo", 10.0), ("gspo_token", 10.0), ("geo_mean", 10.0)]
)
def test_the_log_ratio_is_held_at_its_limit_where_nothing_clips(loss, limit):
    """A < 0 and a ratio above the range: no clip acts, so that the loss is the ratio itself, up to its limit."""
    options = {"clip_ratio_c": None}
    penalty = 0.1 if loss == "kl_cov" else 0.0  # |log r| on the token of the greatest covariance, not held
    for log_ratio in (limit - 0.5, limit + 0.5):
        value, grad, _ = run(loss, one_token(log_ratio, -1.0), **options)
        assert value == pytest.approx(math.exp(min(log_ratio, limit)) + penalty * log_ratio, rel=1e-12)
        slope = math.exp(log_ratio) if log_ratio < limit else 0.0
        assert grad.item() == pytest.approx(slope + penalty, rel=1e-12)


def test_a_tiny_token_ratio_is_held_and_a_tiny_sequence_ratio_is_not():
    assert run("vanilla", one_token(-25.0, 1.0))[0] == pytest.approx(-math.exp(-20.0), rel=1e-12)
    assert run("gspo", one_token(-25.0, 1.0))[0] == pytest.approx(-math.exp(-25.0), rel=1e-12)


def test_tokens_of_the_geometric_mean_are_held_at_20_each():
    """Log-ratios of 40, -50 and 2 count as 20, -20 and 2 (A < 0 clips below, so that -20 becomes -0.4)."""
    case = Case(new=[[-10.0, -60.0, -8.0]], old=[[-50.0, -10.0, -10.0]], adv=[-1.0])
    assert run("geo_mean", case)[0] == pytest.approx(math.exp((20 - 0.4 + 2) / 3), rel=1e-12)
    rising = Case(new=case.new, old=case.old, adv=[1.0])
    assert run("geo_mean", rising)[0] == pytest.approx(-math.exp((0.4 - 20 + 0.4) / 3), rel=1e-12)


@pytest.mark.parametrize("adv", [1.0, -1.0])
@pytest.mark.parametrize("loss", ["gspo", "vanilla", "cispo", "geo_mean"])
def test_a_ratio_on_the_edge_of_the_range_does_not_count_as_clipped(loss, adv):
    case = Case(new=[[-1.0, -2.0]], old=[[-1.0, -2.0]], adv=[adv])
    _, _, metrics = run(loss, case, clip_ratio_low=0.0, clip_ratio_high=0.0)
    assert metrics["actor/pg_clipfrac"] == metrics["actor/pg_clipfrac_token"] == 0.0


def test_a_ratio_on_the_bound_of_the_dual_clip_does_not_count_as_held():
    ratio = torch.tensor(2.0, dtype=torch.float64).exp().item()
    case = Case(new=[[-1.0, -0.9]], old=[[-3.0, -3.0]], adv=[-1.0])
    value, _, metrics = run("vanilla", case, clip_ratio_c=ratio)
    assert value == pytest.approx(ratio) and metrics["actor/pg_clipfrac_dual"] == 0.5


def test_the_dual_clip_of_whole_sequences_counts_sequences():
    """Ratios of e² and 1 in sequences of 1 and 3 tokens, and an advantage above 0 at e²."""
    mask = torch.tensor([[1, 0, 0], [1, 1, 1], [1, 1, 0]])
    change = torch.tensor([[2.0, 0, 0], [0.0, 0.0, 0.0], [2.0, 2.0, 0.0]], dtype=torch.float64)
    advantages = torch.tensor([[-1.0], [-1.0], [1.0]], dtype=torch.float64).expand(3, 3)
    x = LossInputs(change, torch.zeros_like(change), advantages, mask, count_totals(mask))
    metrics = get_policy_loss("vanilla")(x, LossSettings(level="sequence", clip_c=2.0)).metrics
    assert metrics["actor/pg_clipfrac_dual"].result() == pytest.approx(1 / 3)
    assert metrics["actor/pg_clipfrac_upper"].result() == pytest.approx(1 / 3)
    assert metrics["actor/pg_clipfrac_token"].result() == pytest.approx(2 / 6)


@pytest.mark.parametrize("shift", [0.5, -0.5])
def test_ratios_of_sequences_leave_out_those_without_trained_tokens(shift):
    """All ratios on one side of 1: a row without tokens, whose ratio would be 1, must not be the extreme."""
    case = Case(new=[[-1 + shift], [], [-2 + 2 * shift, -2 + 2 * shift]], old=[[-1.0], [], [-2.0, -2.0]], adv=[1.0] * 3)
    _, _, metrics = run("vanilla", case)
    near, far = math.exp(shift), math.exp(2 * shift)
    name = "actor/seq_importance_ratio"
    assert metrics[f"{name}/min"] == pytest.approx(min(near, far))
    assert metrics[f"{name}/max"] == pytest.approx(max(near, far))
    assert metrics[name] == pytest.approx((near + far) / 2)


def test_the_approximate_kl_holds_each_log_ratio_at_20():
    case = Case(new=[[-1.0, -31.0], [-0.5]], old=[[-31.0, -1.0], [-30.5]], adv=[1.0, 1.0])
    assert run("vanilla", case)[2]["actor/ppo_kl"] == pytest.approx((-20 + 20 - 20) / 3)


def test_metrics_of_nothing_read_0():
    _, _, metrics = run("gspo", Case(new=[[], []], old=[[], []], adv=[1.0, 1.0]))
    assert set(metrics.values()) == {0.0}


@pytest.mark.parametrize(("mode", "by_sequence"), [("token_mask", False), ("sequence_truncate", True)])
def test_behaviour_weights_of_padding_are_not_counted(mode, by_sequence):
    """All weights are below 1, the weight that padding would have; the cap lies between them."""
    case = Case(new=[[-1.0, -1.0], [-1.0]], old=[[-1.0, -1.0], [-1.0]], adv=[1.0, 1.0], mu=[[-0.9, -0.7], [-0.5]])
    weights = [math.exp(-0.2)] * 2 + [math.exp(-0.5)] if by_sequence else [math.exp(w) for w in (-0.1, -0.3, -0.5)]
    cap = 0.78
    applied = [w if w <= cap else (cap if by_sequence else 0.0) for w in weights]
    value, _, metrics = run("vanilla", case, True, behav_imp_weight_mode=mode, behav_imp_weight_cap=cap)
    assert value == pytest.approx(-sum(applied) / 3)
    assert metrics["actor/behav_imp_weight"] == pytest.approx(sum(applied) / 3)
    assert metrics["actor/behav_imp_weight/max"] == pytest.approx(max(weights))
    assert metrics["actor/behav_capped_frac"] == pytest.approx(sum(w > cap for w in weights) / 3)
    assert metrics["actor/behav_kl"] == pytest.approx((0.1 + 0.3 + 0.5) / 3)


@pytest.mark.parametrize("action", ["mask", "truncate"])
def test_the_product_of_a_sequence_is_one_weight_for_all_its_tokens(action):
    """Products e^0.6 and e^-0.5 with a cap of 1.5; beyond a log of 20 the weight is held."""
    case = Case(
        new=[[-1.0, -1.0], [-1.0], [-1.0]],
        old=[[-1.0, -1.0], [-1.0], [-1.0]],
        adv=[1.0, 1.0, 1.0],
        mu=[[-1.2, -1.4], [-0.5], [-26.0]],
    )
    options = {"loss_agg_mode": "token-sum", "behav_imp_weight_mode": f"sequence_product_{action}"}
    held = 0.0 if action == "mask" else 1.5
    value, _, metrics = run("vanilla", case, True, behav_imp_weight_cap=1.5, **options)
    assert value == pytest.approx(-(2 * held + math.exp(-0.5) + held))
    assert metrics["actor/behav_capped_frac"] == pytest.approx(3 / 4)
    value, _, metrics = run("vanilla", case, True, **options)
    assert value == pytest.approx(-(2 * math.exp(0.6) + math.exp(-0.5) + math.exp(20)))
    assert metrics["actor/behav_capped_frac"] == 0.0


def turn_inputs() -> tuple[LossInputs, torch.Tensor]:
    """Two rows with observations; log-ratios of 0.4, 0.2 | -0.3 and 0.1, 0.1 | 14, 12, and their turns."""
    turns = torch.tensor([[0, 0, -1, 1, -1], [0, 0, -1, 1, 1]])
    mask = torch.tensor([[1, 1, 0, 1, 0], [1, 1, 0, 1, 1]])
    change = torch.tensor([[0.4, 0.2, 9.0, -0.3, 9.0], [0.1, 0.1, 9.0, 14.0, 12.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, 1.0, 5.0, -2.0, 5.0], [-1.0, -1.0, 5.0, -3.0, -3.0]], dtype=torch.float64)
    old = torch.zeros(2, 5, dtype=torch.float64)
    return LossInputs(change.requires_grad_(), old, advantages, mask, count_totals(mask), turn_ids=turns), change


def test_gspo_by_turn_clips_turns():
    """s = e^0.3 (clipped above for A > 0), e^-0.3 (clipped below for A < 0), e^0.1, and e^10 in place of e^13."""
    x, change = turn_inputs()
    settings = LossSettings(clip_low=0.2, clip_high=0.2, level="turn", aggregation="token-sum")
    out = get_policy_loss("gspo")(x, settings)
    out.loss.backward()
    wanted = 2 * -1.2 + 2 * 0.8 + 2 * math.exp(0.1) + 2 * 3 * math.exp(10)
    assert out.loss.item() == pytest.approx(wanted, rel=1e-12)
    assert not any(metric.value.requires_grad for metric in out.metrics.values())
    assert change.grad[0].tolist() == [0.0] * 5
    assert change.grad[1].tolist() == pytest.approx([math.exp(0.1)] * 2 + [0.0] * 3)
    metrics = {name: metric.result() for name, metric in out.metrics.items()}
    assert metrics["actor/pg_clipfrac"] == pytest.approx(
        (1.0 + 0.0) / 2
    )  # all tokens of the first row, none of the other
    assert metrics["actor/pg_clipfrac_upper"] == pytest.approx((2 / 3) / 2)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx((1 / 3) / 2)
    assert metrics["actor/pg_clipfrac_token"] == pytest.approx(3 / 7)


def test_the_gradient_at_the_level_of_a_token_within_a_sequence_is_its_own():
    mask = torch.tensor([[1, 1, 1]]).bool()
    new = torch.tensor([[0.3, 0.0, -0.6]], dtype=torch.float64, requires_grad=True)
    x = LossInputs(new, torch.zeros(1, 3, dtype=torch.float64), torch.ones(1, 3), mask, count_totals(mask))
    ratio = importance_ratio("sequence_token", x)
    assert ratio.tolist()[0] == pytest.approx([math.exp(-0.1)] * 3)
    (grad,) = torch.autograd.grad(ratio[0, 1], new)
    assert grad[0].tolist() == pytest.approx([0.0, math.exp(-0.1), 0.0])
    with pytest.raises(ValueError, match="importance_sampling_level=None"):
        importance_ratio(None, x)


def test_each_metric_of_a_mini_batch_merges_from_parts_of_uneven_size():
    """The loss is a sum over parts, every fraction and mean is over all tokens or sequences of the mini-batch."""
    x, _ = turn_inputs()
    settings = LossSettings(clip_low=0.2, clip_high=0.2, level="turn", behaviour=Behaviour("token_truncate", 1.1))
    new, old, advantages = x.log_probs.detach(), x.old_log_probs, x.advantages
    mu = torch.tensor([[0.1], [-0.3]], dtype=torch.float64).expand(2, 5)

    def part(rows: slice):
        inputs = LossInputs(new[rows], old[rows], advantages[rows], x.mask[rows], x.totals, mu[rows], x.turn_ids[rows])
        return get_policy_loss("gspo")(inputs, settings)

    whole, first, second = part(slice(None)), part(slice(0, 1)), part(slice(1, 2))
    assert whole.loss.item() == pytest.approx((first.loss + second.loss).item())
    for name, metric in whole.metrics.items():
        assert first.metrics[name].merge(second.metrics[name]).result() == pytest.approx(metric.result()), name
    assert whole.metrics["actor/pg_loss"].result() == pytest.approx(whole.loss.item())
    assert whole.metrics["actor/behav_capped_frac"].result() == pytest.approx(4 / 7)
