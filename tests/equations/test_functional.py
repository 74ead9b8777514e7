"""The stable entry points: signatures, messages, registries, cheap import."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings

import pytest
import torch

from gspo import algo
from gspo.algo import LossSettings, compute_policy_loss, get_policy_loss, policy_loss
from gspo.algo.advantages import ADVANTAGE_ESTIMATORS
from gspo.algo.losses import POLICY_LOSSES, ratio_band, reduce_loss
from gspo.algo.ratios import importance_ratio
from gspo.algo.settings import AGGREGATIONS, length_weighting_note
from gspo.types import BatchTotals

ONES = torch.ones(2, 3)


def test_signatures():
    loss = inspect.signature(algo.compute_policy_loss).parameters
    assert list(loss)[:13] == [
        "loss_mode",
        "log_probs",
        "old_log_probs",
        "advantages",
        "response_mask",
        "clip_ratio_low",
        "clip_ratio_high",
        "clip_ratio_c",
        "loss_agg_mode",
        "rollout_log_probs",
        "behav_imp_weight_cap",
        "behav_imp_weight_mode",
        "totals",
    ]
    assert loss["clip_ratio_c"].default == 3.0
    assert loss["behav_imp_weight_mode"].default == "token_mask"
    advantage = inspect.signature(algo.compute_advantage).parameters
    assert list(advantage) == [
        "adv_estimator",
        "token_level_rewards",
        "response_mask",
        "group_ids",
        "values",
        "gamma",
        "lam",
        "norm_adv_by_std_in_grpo",
        "std_level",
        "kw",
    ]
    assert list(inspect.signature(algo.kl_penalty).parameters) == ["kind", "log_probs", "ref_log_probs"]


def test_every_public_name_resolves():
    for name in algo.__all__:
        assert getattr(algo, name) is not None
    with pytest.raises(AttributeError, match="nothing_here"):
        _ = algo.nothing_here


def test_settings_are_checked_without_torch():
    code = (
        "import sys, gspo.algo.settings as s; s.LossSettings(aggregation='token-mean'); "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_metrics_are_floats_and_the_loss_has_a_gradient():
    log_probs = torch.zeros(2, 3, requires_grad=True)
    loss, metrics = compute_policy_loss("gspo", log_probs, torch.zeros(2, 3), torch.ones(2), ONES)
    assert loss.requires_grad and loss.ndim == 0
    assert all(type(value) is float for value in metrics.values())


def test_advantages_per_token_and_per_sequence_agree():
    generator = torch.Generator().manual_seed(0)
    new, old = (torch.randn(2, 3, generator=generator) for _ in range(2))
    advantages = torch.tensor([1.0, -2.0])
    for name in POLICY_LOSSES.names():
        short = compute_policy_loss(name, new, old, advantages, ONES)[0]
        long = compute_policy_loss(name, new, old, advantages[:, None].expand(2, 3), ONES)[0]
        assert torch.equal(short, long)


def test_given_totals_are_the_denominators():
    loss, metrics = compute_policy_loss(
        "vanilla", ONES, ONES, torch.ones(2), ONES, totals=BatchTotals(num_tokens=60, num_sequences=20)
    )
    assert loss.item() == pytest.approx(-6 / 60)
    assert metrics["actor/pg_loss"] == pytest.approx(-6 / 60)


def test_low_precision_is_computed_in_float32():
    new, old = (ONES * 0.5).bfloat16(), (ONES * 0.25).bfloat16()
    loss, _ = compute_policy_loss("sapo", new, old, torch.ones(2), ONES)
    assert loss.dtype == torch.float32


class TestMessages:
    def test_unknown_loss(self):
        with pytest.raises(ValueError, match=r"loss_mode='gpso'.*did you mean 'gspo'"):
            compute_policy_loss("gpso", ONES, ONES, torch.ones(2), ONES)

    def test_unknown_aggregation(self):
        with pytest.raises(ValueError, match=r"loss_agg_mode='mean'.*token-mean"):
            compute_policy_loss("gspo", ONES, ONES, torch.ones(2), ONES, loss_agg_mode="mean")

    def test_shapes(self):
        with pytest.raises(ValueError, match=r"old_log_probs has shape \(2, 4\)"):
            compute_policy_loss("gspo", ONES, torch.ones(2, 4), torch.ones(2), ONES)
        with pytest.raises(ValueError, match=r"advantages has shape \(3,\)"):
            compute_policy_loss("gspo", ONES, ONES, torch.ones(3), ONES)

    @pytest.mark.parametrize("key", ["clip_ratio_low", "clip_ratio_high", "clip_ratio_c"])
    def test_negative_clip(self, key):
        with pytest.raises(ValueError, match=f"{key}=-0.1"):
            compute_policy_loss("gspo", ONES, ONES, torch.ones(2), ONES, **{key: -0.1})

    def test_level_a_loss_cannot_use(self):
        with pytest.raises(ValueError, match="importance_sampling_level=token cannot be used with loss_mode=gspo"):
            get_policy_loss("gspo").resolve(LossSettings(level="token"))

    def test_fixed_length_is_required(self):
        with pytest.raises(ValueError, match="fixed length"):
            LossSettings(aggregation="seq-mean-token-sum-norm")

    def test_cap_without_behaviour_log_probs_warns(self):
        with pytest.warns(UserWarning, match="behav_imp_weight_cap has no effect"):
            compute_policy_loss("gspo", ONES, ONES, torch.ones(2), ONES, behav_imp_weight_cap=5.0)

    def test_length_weighted_gspo_warns_and_is_honoured(self):
        with pytest.warns(UserWarning, match="weighs every sequence by its length"):
            compute_policy_loss("gspo", ONES, ONES, torch.ones(2), ONES, loss_agg_mode="token-mean")
        for mode in AGGREGATIONS:
            assert (length_weighting_note("gspo", mode) is None) == (mode == "seq-mean-token-mean")
        assert length_weighting_note("gspo", None) is None
        assert length_weighting_note("vanilla", "token-mean") is None

    def test_defaults_do_not_warn(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for name in POLICY_LOSSES.names():
                compute_policy_loss(name, ONES, ONES, torch.ones(2), ONES)


def test_a_user_adds_a_loss_and_an_estimator(monkeypatch):
    for table in (POLICY_LOSSES, ADVANTAGE_ESTIMATORS):
        monkeypatch.setattr(table, "_items", dict(table._items))

    @policy_loss("test_unclipped", aggregation="token-sum")
    def unclipped(x, s):
        ratio = importance_ratio(s.level, x)
        return reduce_loss(-x.advantages * ratio, x, s, ratio_band(ratio, s))

    @algo.advantage_estimator("test_constant", options=("height",))
    def constant(x):
        filled = x.mask * float(x.options["height"])
        return filled, filled

    assert unclipped.__name__ == "unclipped"
    advantages, _ = algo.compute_advantage("test_constant", ONES, ONES, [0, 0], height=2)
    loss, metrics = compute_policy_loss("test_unclipped", ONES * 0.5, ONES * 0.0, advantages, ONES)
    assert loss.item() == pytest.approx(-6 * 2 * 1.6487212707)
    assert metrics["actor/pg_clipfrac_upper"] == 1.0
    with pytest.raises(ValueError, match="already registered"):
        policy_loss("gspo")(unclipped)
