"""Equalities between losses that the mathematics promises, in float64."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from gspo.algo import LossSettings, compute_policy_loss, count_totals, get_policy_loss
from gspo.algo.losses import clean_inputs
from gspo.algo.ratios import importance_ratio
from gspo.types import LossInputs
from tests.equations.loss_reference import LOSSES, Case, random_case, spread_of

pytestmark = pytest.mark.filterwarnings("ignore:loss_agg_mode")


def run(loss: str, case: Case, **kw):
    tensors = case.tensors()
    if "behav_imp_weight_mode" not in kw:
        del tensors["rollout_log_probs"]
    tensors["log_probs"].requires_grad_()
    value, _ = compute_policy_loss(loss, **tensors, **kw)
    value.backward()
    return value.detach(), tensors["log_probs"].grad


def assert_same(a, b, rtol=1e-8):
    torch.testing.assert_close(a[0], b[0], rtol=rtol, atol=1e-13)
    torch.testing.assert_close(a[1], b[1], rtol=rtol, atol=1e-13)


@pytest.mark.parametrize("seed", range(5))
def test_on_policy_gspo_is_grpo(seed):
    """At θ = θ_old the gradients agree, so one update a rollout batch makes GSPO equal to GRPO."""
    case = random_case(seed, 0.0)
    _, gspo = run("gspo", case)
    _, grpo = run("vanilla", case, loss_agg_mode="seq-mean-token-mean")
    assert gspo.abs().sum() > 0
    torch.testing.assert_close(gspo, grpo, rtol=1e-8, atol=0)


@pytest.mark.parametrize("seed", range(5))
def test_gspo_is_gspo_token_for_sequence_advantages(seed):
    case = random_case(seed, 1e-3)
    assert_same(run("gspo", case), run("gspo_token", case))


def test_published_gspo_is_not_gspo_token_under_token_mean():
    """Token-mean weighs each sequence by its length. What it does to both forms is the same, for one A a sequence."""
    case = random_case(1, 1e-3)
    weighted = run("gspo_token", case, loss_agg_mode="token-mean")
    assert weighted[0].item() != pytest.approx(run("gspo", case)[0].item(), rel=1e-3)
    assert_same(run("gspo", case, loss_agg_mode="token-mean"), weighted)


@pytest.mark.parametrize("seed", range(5))
def test_gspo_gradient_in_closed_form(seed):
    """-(1/N) Σ s_i A_i (1/|y_i|) Σ_t ∇logp_it for unclipped sequences, exactly 0 for clipped ones."""
    case = random_case(seed, 1e-3, num_rows=20)
    _, grad = run("gspo", case)
    present = [i for i, row in enumerate(case.new) if row]
    num_clipped = 0
    for i in present:
        new, old, adv = case.new[i], case.old[i], case.adv[i]
        s = torch.tensor([a - b for a, b in zip(new, old)], dtype=torch.float64).mean().exp().item()
        clipped = (adv > 0 and s > 1 + 4e-4) or (adv < 0 and s < 1 - 3e-4)
        num_clipped += clipped
        row = grad[i, : len(new)]
        if clipped:
            assert torch.equal(row, torch.zeros_like(row))
        else:
            assert row.tolist() == pytest.approx([-s * adv / len(new) / len(present)] * len(new), rel=1e-8)
    assert 0 < num_clipped < len(present)


@pytest.mark.parametrize("seed", range(3))
def test_single_token_gspo_is_grpo(seed):
    case = random_case(seed, 1e-3, max_length=1, empty=False)
    grpo = run("vanilla", case, clip_ratio_low=3e-4, clip_ratio_high=4e-4, loss_agg_mode="seq-mean-token-mean")
    assert_same(run("gspo", case), grpo)


@pytest.mark.parametrize("mode", ["token_mask", "token_truncate", "sequence_mask", "sequence_truncate"])
@pytest.mark.parametrize("loss", LOSSES)
def test_unit_weight_decoupled_is_standard(loss, mode):
    case = dataclasses.replace(random_case(2, spread_of(loss)), mu=[])
    decoupled = run(loss, case, behav_imp_weight_mode=mode, behav_imp_weight_cap=5.0)
    standard = run(loss, case)
    assert torch.equal(decoupled[0], standard[0])
    assert torch.equal(decoupled[1], standard[1])


def inputs(case: Case) -> LossInputs:
    tensors = case.tensors(fill=0.0)
    mask = tensors["response_mask"]
    advantages = tensors["advantages"].unsqueeze(-1).expand(mask.shape)
    log_probs = tensors["log_probs"].requires_grad_()
    return LossInputs(log_probs, tensors["old_log_probs"], advantages, mask, count_totals(mask))


@pytest.mark.parametrize(("level", "twin"), [("sequence", "gspo"), ("sequence_token", "gspo_token")])
def test_vanilla_surrogate_at_sequence_level_is_gspo(level, twin):
    x = inputs(random_case(4, 1e-3))
    settings = LossSettings(clip_low=3e-4, clip_high=4e-4, aggregation="seq-mean-token-mean", level=level)
    ours, theirs = get_policy_loss("vanilla")(x, settings), get_policy_loss(twin)(x)
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(*(torch.autograd.grad(out.loss, x.log_probs)[0] for out in (ours, theirs)))
    for side in ("", "_lower", "_upper"):
        name = f"actor/pg_clipfrac{side}"
        assert ours.metrics[name].result() == theirs.metrics[name].result()


def test_dapo_is_vanilla_with_clip_higher():
    case = random_case(6, 0.5)
    assert_same(run("dapo", case), run("vanilla", case, clip_ratio_high=0.28), rtol=0)


def test_gspo_token_takes_per_token_advantages():
    """Value and gradient of token t follow A_it alone: -A_it·s_i/(|y_i|·N)."""
    case = Case(new=[[-1.0, -2.0]], old=[[-1.0, -2.0]], adv=[0.0])
    tensors = case.tensors()
    del tensors["rollout_log_probs"]
    tensors["advantages"] = torch.tensor([[1.0, -3.0]], dtype=torch.float64)
    tensors["log_probs"].requires_grad_()
    loss, _ = compute_policy_loss("gspo_token", **tensors)
    loss.backward()
    assert loss.item() == pytest.approx(1.0)
    assert tensors["log_probs"].grad.tolist() == [[-0.5, 1.5]]


def test_ratio_levels():
    x = clean_inputs(inputs(Case(new=[[-1.0, -2.0], [-1.0]], old=[[-1.5, -2.25], [-21.5]], adv=[1.0, 1.0])))
    token = importance_ratio("token", x)
    assert token[0].tolist() == pytest.approx(torch.tensor([0.5, 0.25], dtype=torch.float64).exp().tolist())
    assert token[1, 0].item() == pytest.approx(torch.tensor(20.0, dtype=torch.float64).exp().item())
    sequence = importance_ratio("sequence", x)
    log_s = torch.tensor([[0.375], [10.0]], dtype=torch.float64)
    torch.testing.assert_close(sequence, log_s.exp())
    assert torch.equal(importance_ratio("sequence_token", x)[0], sequence[0].expand(2))


@pytest.mark.parametrize("loss", ["gspo", "gspo_token", "vanilla"])
def test_equal_log_probs_give_a_ratio_of_exactly_one(loss):
    case = random_case(0, 0.0)
    tensors = {k: v.float() for k, v in case.tensors().items() if k != "rollout_log_probs"}
    _, metrics = compute_policy_loss(loss, **tensors)
    assert metrics["actor/seq_importance_ratio/min"] == metrics["actor/seq_importance_ratio/max"] == 1.0
