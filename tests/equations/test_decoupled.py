"""The decoupled loss: four weight modes, the cap as a mask, denominators unchanged."""

from __future__ import annotations

import math

import pytest
import torch

from gspo.algo import Behaviour, LossSettings, compute_policy_loss, get_policy_loss
from gspo.types import BatchTotals, LossInputs
from tests.equations.loss_reference import LOSSES, Case, loss_and_gradient, random_case, spread_of

MODES = ("token_mask", "token_truncate", "sequence_mask", "sequence_truncate")


def weights_by_hand(case: Case, mode: str, cap: float | None) -> list[list[float]]:
    rows = []
    for old, mu in zip(case.old, case.mu):
        logs = [a - b for a, b in zip(old, mu)]
        if mode.startswith("sequence") and logs:
            logs = [sum(logs) / len(logs)] * len(logs)
        row = [math.exp(value) for value in logs]
        if cap is not None:
            row = [w if w <= cap else (0.0 if mode.endswith("mask") else cap) for w in row]
        rows.append(row)
    return rows


@pytest.mark.parametrize("cap", [None, 1.1])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("loss", LOSSES)
def test_value_gradient_and_metrics(loss, mode, cap):
    case = random_case(11, spread_of(loss), num_rows=9)
    weights = weights_by_hand(case, mode, cap)
    expected, expected_gradient = loss_and_gradient(loss, case, weights=weights)
    tensors = case.tensors()
    tensors["log_probs"].requires_grad_()
    value, metrics = compute_policy_loss(loss, **tensors, behav_imp_weight_mode=mode, behav_imp_weight_cap=cap)
    value.backward()
    assert value.item() == pytest.approx(expected, rel=1e-10)
    for grad, row in zip(tensors["log_probs"].grad, expected_gradient):
        assert grad[: len(row)].tolist() == pytest.approx(row, rel=1e-10, abs=1e-14)
    flat = [w for row in weights for w in row]
    raw = [w for row in weights_by_hand(case, mode, None) for w in row]
    capped = [cap is not None and w > cap for w in raw]
    assert metrics["actor/behav_imp_weight"] == pytest.approx(sum(flat) / len(flat))
    assert metrics["actor/behav_imp_weight/max"] == pytest.approx(max(raw))
    assert metrics["actor/behav_capped_frac"] == pytest.approx(sum(capped) / len(capped))
    assert any(capped) == (cap is not None)
    drift = [m - o for old, mu in zip(case.old, case.mu) for o, m in zip(old, mu)]
    assert metrics["actor/behav_kl"] == pytest.approx(sum(drift) / len(drift))  # KL(μ ‖ π_old), sampled under μ


def test_cap_is_a_mask_and_the_denominator_stays():
    """Two tokens at ratio 1, A = 1; the second has w = e² > 5 and drops out of the sum, not of the count."""
    case = Case(new=[[-1.0, -1.0]], old=[[-1.0, -1.0]], adv=[1.0], mu=[[-1.0, -3.0]])
    tensors = case.tensors()
    loss, _ = compute_policy_loss("vanilla", **tensors, behav_imp_weight_cap=5.0)
    assert loss.item() == pytest.approx(-0.5)
    truncated, _ = compute_policy_loss(
        "vanilla", **tensors, behav_imp_weight_cap=5.0, behav_imp_weight_mode="token_truncate"
    )
    assert truncated.item() == pytest.approx(-(1 + 5) / 2)
    uncapped, _ = compute_policy_loss("vanilla", **tensors)
    assert uncapped.item() == pytest.approx(-(1 + math.exp(2)) / 2)


def test_weight_equal_to_the_cap_stays():
    case = Case(new=[[-1.0]], old=[[-1.0]], adv=[1.0], mu=[[-1.0]])
    loss, _ = compute_policy_loss("vanilla", **case.tensors(), behav_imp_weight_cap=1.0)
    assert loss.item() == -1.0


def test_a_gradient_reaches_the_policy_alone():
    case = random_case(3, 0.1)
    tensors = case.tensors(fill=0.0)
    names = ("old_log_probs", "rollout_log_probs", "advantages")
    leaves = {name: tensors[name].requires_grad_() for name in names}
    tensors["log_probs"].requires_grad_()
    compute_policy_loss("vanilla", **tensors)[0].backward()
    assert all(leaf.grad is None for leaf in leaves.values())


def test_missing_behaviour_log_probs_are_named():
    ones = torch.ones(1, 1)
    x = LossInputs(ones, ones, ones, ones, BatchTotals(1, 1))
    with pytest.raises(ValueError, match="rollout_log_probs"):
        get_policy_loss("gspo")(x, LossSettings(behaviour=Behaviour()))


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match=r"behav_imp_weight_mode='mask'.*token_mask"):
        Behaviour("mask")
    with pytest.raises(ValueError, match="behav_imp_weight_cap=-1"):
        Behaviour(cap=-1)
