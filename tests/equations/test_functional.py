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
    optional = ("clip_ratio_low", "clip_ratio_high", "loss_agg_mode", "rollout_log_probs", "totals", "loss_norm_length")
    assert {loss[name].default for name in (*optional, "behav_imp_weight_cap")} == {None}
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
    defaults = {name: each.default for name, each in advantage.items() if each.default is not each.empty}
    wanted = {"values": None, "gamma": 1.0, "lam": 1.0, "norm_adv_by_std_in_grpo": True, "std_level": "group"}
    assert defaults == wanted
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


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (torch.float64, torch.float64),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.int64, torch.float32),
    ],
)
@pytest.mark.parametrize("name", ["grpo", "reinforce_plus_plus", "gae"])
def test_advantages_have_the_precision_of_rewards_and_at_least_float32(name, given, wanted):
    rewards = torch.tensor([[0, 1], [0, 3]]).to(given)
    values = torch.zeros(2, 2, dtype=torch.float64)
    found = algo.compute_advantage(name, rewards, torch.ones(2, 2), ["x", ("y", 1)], values=values)
    assert {tensor.dtype for tensor in found} == {wanted}


def test_group_ids_of_any_kind_name_the_same_groups():
    rewards = torch.tensor([[1.0], [2.0], [5.0], [7.0]], requires_grad=True)
    for ids in (torch.tensor([7, -2, 7, -2]), ["a", "b", "a", "b"], [None, (0, "x"), None, (0, "x")]):
        advantages, _ = algo.compute_advantage("dr_grpo", rewards, torch.ones(4, 1), ids)
        assert advantages.flatten().tolist() == [-2.0, -2.5, 2.0, 2.5]
        assert not advantages.requires_grad


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
        for advantages in (torch.ones(3), torch.ones(2, 1), torch.ones(()), torch.ones(3, 2)):
            shape = ", ".join(map(str, advantages.shape))
            with pytest.raises(ValueError, match=rf"advantages has shape \({shape},?\): expected \(2,\) or \(2, 3\)"):
                compute_policy_loss("gspo", ONES, ONES, advantages, ONES)
        with pytest.raises(ValueError, match=r"response_mask has shape \(2,\): expected \(2, 3\)"):
            compute_policy_loss("gspo", ONES, ONES, torch.ones(2), torch.ones(2))
        with pytest.raises(ValueError, match=r"rollout_log_probs has shape \(1, 3\)"):
            compute_policy_loss("gspo", ONES, ONES, torch.ones(2), ONES, rollout_log_probs=torch.ones(1, 3))
        with pytest.raises(ValueError, match=r"response_mask has shape \(2, 1\)"):
            algo.compute_advantage("grpo", ONES, torch.ones(2, 1), [0, 0])
        with pytest.raises(ValueError, match=r"values has shape \(2, 1\)"):
            algo.compute_advantage("grpo", ONES, ONES, [0, 0], values=torch.ones(2, 1))
        with pytest.raises(ValueError, match=r"ref_log_probs has shape \(2, 1\)"):
            algo.kl_penalty("k1", ONES, torch.ones(2, 1))

    def test_rewards_that_are_not_finite_name_the_first_row_and_their_number(self):
        rewards = torch.tensor([[1.0, 0.0], [0.0, float("inf")], [0.0, 0.0], [float("-inf"), float("nan")]])
        with pytest.raises(ValueError, match=r"not finite in row 1 \(2 such rows\)"):
            algo.compute_advantage("dr_grpo", rewards, torch.ones(4, 2), [0, 0, 0, 0])

    def test_a_fixed_length_that_is_not_given_is_1_with_a_warning(self):
        with pytest.warns(UserWarning, match="taken as 1") as caught:
            loss, _ = compute_policy_loss(
                "vanilla", ONES, ONES, torch.ones(2), ONES, loss_agg_mode="seq-mean-token-sum-norm"
            )
        assert loss.item() == pytest.approx(-6 / 2) and caught[0].filename == __file__
        given, _ = compute_policy_loss(
            "vanilla", ONES, ONES, torch.ones(2), ONES, loss_agg_mode="seq-mean-token-sum-norm", loss_norm_length=4
        )
        assert given.item() == pytest.approx(-6 / 2 / 4)

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
