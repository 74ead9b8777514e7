"""Clip fractions count the side on which the advantage's sign lets the clip act, for every loss."""

from __future__ import annotations

import math

import pytest
import torch

from gspo.algo import compute_policy_loss
from gspo.algo.diagnostics import entropy_metric
from tests.equations.loss_reference import DEFAULTS, LOSSES, Case, random_case, spread_of

pytestmark = pytest.mark.filterwarnings("ignore:loss_agg_mode")


def metrics_of(loss: str, case: Case, **kw) -> dict[str, float]:
    tensors = case.tensors()
    del tensors["rollout_log_probs"]
    return compute_policy_loss(loss, **tensors, **kw)[1]


def shifted(loss: str, direction: int, adv: float) -> Case:
    """Four sequences of lengths 1-4, of which the last has left the band in `direction`; the rest sit at ratio 1."""
    low, high, _ = DEFAULTS[loss]
    step = 1.5 * (high if direction > 0 else -low)
    old = [[-1.0] * n for n in (1, 2, 3, 4)]
    new = [list(row) for row in old]
    new[3] = [value + step for value in new[3]]
    return Case(new, old, [adv] * 4)


@pytest.mark.parametrize(
    ("direction", "adv", "lower", "upper"),
    [(+1, 1.0, 0, 1), (-1, -1.0, 1, 0), (+1, -1.0, 0, 0), (-1, 1.0, 0, 0), (+1, 0.0, 0, 0), (-1, 0.0, 0, 0)],
)
@pytest.mark.parametrize("loss", LOSSES)
def test_side(loss, direction, adv, lower, upper):
    share = 1 / 4 if loss in ("gspo", "gspo_token") else 4 / 10
    metrics = metrics_of(loss, shifted(loss, direction, adv))
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(lower * share)
    assert metrics["actor/pg_clipfrac_upper"] == pytest.approx(upper * share)
    assert metrics["actor/pg_clipfrac"] == pytest.approx((lower + upper) * share)
    assert metrics["actor/pg_clipfrac_token"] == pytest.approx((lower + upper) * 4 / 10)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("loss", LOSSES)
def test_fractions_against_a_count(loss, seed):
    case = random_case(seed, spread_of(loss), num_rows=12)
    low, high, _ = DEFAULTS[loss]
    by_sequence = loss in ("gspo", "gspo_token")
    lower = upper = total = 0
    for new, old, adv in zip(case.new, case.old, case.adv):
        logs = [a - b for a, b in zip(new, old)]
        if by_sequence:
            positions = [math.exp(sum(logs) / len(logs)) - 1] if logs else []
        else:
            positions = logs if loss == "geo_mean" else [math.exp(value) - 1 for value in logs]
        total += len(positions)
        upper += sum(adv > 0 and position > high for position in positions)
        lower += sum(adv < 0 and position < -low for position in positions)
    metrics = metrics_of(loss, case)
    assert metrics["actor/pg_clipfrac_upper"] == pytest.approx(upper / total)
    assert metrics["actor/pg_clipfrac_lower"] == pytest.approx(lower / total)
    assert metrics["actor/pg_clipfrac"] == pytest.approx((upper + lower) / total)


@pytest.mark.parametrize("loss", ["gspo", "gspo_token", "vanilla", "dapo"])
def test_counted_sequences_and_tokens_are_those_without_gradient(loss):
    """The metric and the gradient must tell the same story."""
    case = random_case(8, spread_of(loss), num_rows=12, empty=False)
    case.adv[0] = 1.0
    tensors = case.tensors()
    del tensors["rollout_log_probs"]
    tensors["log_probs"].requires_grad_()
    value, metrics = compute_policy_loss(loss, **tensors, clip_ratio_c=None)
    value.backward()
    dead = (tensors["log_probs"].grad == 0) & tensors["response_mask"].bool()
    assert dead.any()
    assert metrics["actor/pg_clipfrac_token"] == pytest.approx(
        dead.sum().item() / tensors["response_mask"].sum().item()
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_names_are_the_same_for_every_loss(loss):
    expected = {
        "actor/pg_loss",
        "actor/pg_clipfrac",
        "actor/pg_clipfrac_lower",
        "actor/pg_clipfrac_upper",
        "actor/pg_clipfrac_token",
        "actor/seq_importance_ratio",
        "actor/seq_importance_ratio/min",
        "actor/seq_importance_ratio/max",
        "actor/ppo_kl",
    }
    assert set(metrics_of(loss, random_case(0, 0.01))) - {"actor/pg_clipfrac_dual"} == expected


def test_sapo_counts_against_the_band_it_is_given():
    case = Case(new=[[-0.9, -0.5]], old=[[-1.0, -1.0]], adv=[1.0])
    assert metrics_of("sapo", case)["actor/pg_clipfrac"] == 0.5
    assert metrics_of("sapo", case, clip_ratio_high=0.05)["actor/pg_clipfrac"] == 1.0


def test_ppo_kl_is_a_token_mean():
    case = Case(new=[[-1.0, -1.5], [-2.0]], old=[[-0.5, -1.0], [-3.5]], adv=[1.0, 1.0])
    assert metrics_of("vanilla", case)["actor/ppo_kl"] == pytest.approx((0.5 + 0.5 - 1.5) / 3)


def test_entropy_is_a_token_mean():
    entropy = torch.tensor([[1.0, 2.0, float("nan")], [4.0, float("nan"), float("nan")]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    whole = entropy_metric(entropy, mask)["actor/entropy"]
    assert whole.result() == pytest.approx(7 / 3)
    first, second = (entropy_metric(entropy[i : i + 1], mask[i : i + 1])["actor/entropy"] for i in (0, 1))
    assert first.merge(second).result() == whole.result()
