"""What settings of a loss are accepted, which defaults each loss has, and that a value of 0 is a value."""

from __future__ import annotations

import math

import pytest
import torch

from gspo.algo import Behaviour, LossSettings, count_totals, get_policy_loss, policy_loss
from gspo.algo.advantages import ADVANTAGE_ESTIMATORS
from gspo.algo.losses import POLICY_LOSSES
from gspo.algo.settings import BEHAVIOUR_MODES, ESTIMATORS, LOSSES, length_weighting_note
from gspo.types import LossInputs

ALL_LEVELS = ("token", "sequence", "sequence_token", "turn")
TABLE = {  # ε below and above, aggregation, ratio levels with the default first, whether the range clips
    "gspo": (3e-4, 4e-4, "seq-mean-token-mean", ("sequence", "turn"), True),
    "gspo_token": (3e-4, 4e-4, "seq-mean-token-mean", ("sequence_token",), True),
    "vanilla": (0.2, 0.2, "token-mean", ALL_LEVELS, True),
    "dapo": (0.2, 0.28, "token-mean", ALL_LEVELS, True),
    "cispo": (0.2, 0.28, "token-mean", ALL_LEVELS, True),
    "geo_mean": (0.4, 0.4, "seq-mean-token-mean", ("token",), True),
    "sapo": (0.2, 0.2, "seq-mean-token-mean", ALL_LEVELS, False),
    "clip_cov": (0.2, 0.2, "token-mean", ("token",), True),
    "kl_cov": (0.2, 0.2, "token-mean", ("token",), False),
    "gpg": (0.2, 0.2, "token-mean", ("token",), False),
}


def test_every_loss_has_the_defaults_of_its_paper():
    assert set(POLICY_LOSSES.names()) >= set(TABLE) == set(LOSSES)
    for name, (low, high, aggregation, levels, clips) in TABLE.items():
        defaults = get_policy_loss(name).defaults
        assert (defaults.clip_low, defaults.clip_high, defaults.aggregation) == (low, high, aggregation), name
        assert (defaults.levels, defaults.clips) == (levels, clips), name
        assert get_policy_loss(name).resolve(LossSettings()).level == levels[0]


@pytest.mark.parametrize("name", TABLE)
def test_a_loss_supports_its_levels_and_refuses_the_others(name):
    loss = get_policy_loss(name)
    for level in ALL_LEVELS:
        if level in TABLE[name][3]:
            assert loss.resolve(LossSettings(level=level)).level == level
        else:
            with pytest.raises(ValueError, match=f"importance_sampling_level={level} cannot be used"):
                loss.resolve(LossSettings(level=level))


def test_what_is_set_stays_even_if_it_is_0():
    given = LossSettings(clip_low=0.0, clip_high=0.0, clip_c=None, aggregation="token-sum", norm_length=5.0)
    resolved = get_policy_loss("gspo").resolve(given)
    assert (resolved.clip_low, resolved.clip_high, resolved.clip_c) == (0.0, 0.0, None)
    assert (resolved.aggregation, resolved.norm_length) == ("token-sum", 5.0)
    half = get_policy_loss("dapo").resolve(LossSettings(clip_low=0.5))
    assert (half.clip_low, half.clip_high) == (0.5, 0.28)


def test_settings_that_nobody_gave():
    settings = LossSettings()
    assert (settings.clip_c, settings.tau_pos, settings.tau_neg) == (3.0, 1.0, 1.05)
    assert (settings.clip_cov_ratio, settings.clip_cov_bounds) == (0.0002, (1.0, 5.0))
    assert (settings.kl_cov_ratio, settings.kl_cov_coef, settings.behaviour) == (0.0002, 0.1, None)
    assert (Behaviour().mode, Behaviour().cap) == ("token_mask", None)


@pytest.mark.parametrize(
    ("key", "name", "refused", "accepted"),
    [
        ("clip_low", "clip_ratio_low", (-1e-9, math.nan), (0.0, 0.5)),
        ("clip_high", "clip_ratio_high", (-1e-9, math.nan), (0.0, 5.0)),
        ("clip_c", "clip_ratio_c", (1.0, 0.5, math.nan), (1.001, None)),
        ("tau_pos", "tau_pos", (0.0, -1.0, math.nan), (0.01,)),
        ("tau_neg", "tau_neg", (0.0, -1.0, math.nan), (0.01,)),
        ("norm_length", "loss_scale_factor", (0.0, -3.0, math.nan), (0.5, None)),
        ("aggregation", "loss_agg_mode", ("", "mean"), ("token-sum", None)),
        ("level", "importance_sampling_level", ("", "word"), ("turn", None)),
    ],
)
def test_each_setting_is_refused_beyond_its_bound_and_accepted_within(key, name, refused, accepted):
    for value in refused:
        with pytest.raises(ValueError, match=name):
            LossSettings(**{key: value})
    for value in accepted:
        assert getattr(LossSettings(**{key: value}), key) == value


def test_a_cap_of_the_behaviour_weight_is_above_0():
    for cap in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="behav_imp_weight_cap"):
            Behaviour(cap=cap)
    assert Behaviour(cap=1e-3).cap == 1e-3
    assert [Behaviour(mode).mode for mode in BEHAVIOUR_MODES] == list(BEHAVIOUR_MODES)


def test_both_forms_of_gspo_warn_of_weights_by_length():
    for loss in ("gspo", "gspo_token"):
        note = length_weighting_note(loss, "seq-mean-token-sum")
        assert note is not None and "loss_agg_mode=seq-mean-token-sum" in note and f"loss_mode={loss}" in note
        assert length_weighting_note(loss, None) is None is length_weighting_note(loss, "seq-mean-token-mean")
    assert length_weighting_note("dapo", "seq-mean-token-sum") is None


def test_the_estimators_that_the_config_offers_are_those_that_are_registered():
    assert set(ESTIMATORS) <= set(ADVANTAGE_ESTIMATORS.names())


def test_a_registered_loss_has_the_defaults_it_was_registered_with(monkeypatch):
    monkeypatch.setattr(POLICY_LOSSES, "_items", dict(POLICY_LOSSES._items))

    @policy_loss("plain_of_this_test")
    def plain(x, s):
        raise AssertionError

    @policy_loss("other_of_this_test", clip_low=0.5, clip_high=0.6, aggregation="token-sum", levels=("turn", "token"))
    def other(x, s):
        raise AssertionError

    plain_settings, other_settings = (
        get_policy_loss(f"{name}_of_this_test").resolve(LossSettings()) for name in ("plain", "other")
    )
    assert (plain_settings.clip_low, plain_settings.clip_high) == (0.2, 0.2)
    assert (plain_settings.aggregation, plain_settings.level) == ("token-mean", "token")
    assert (other_settings.clip_low, other_settings.clip_high) == (0.5, 0.6)
    assert (other_settings.aggregation, other_settings.level) == ("token-sum", "turn")


def test_sapo_has_a_temperature_for_each_sign():
    """-A·σ(τ(r - 1))·4/τ of one token of either sign, and its slope -A·4·σ(1 - σ)·r."""
    new = torch.tensor([[0.3], [-0.2], [0.1]], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([[2.0], [-3.0], [0.0]], dtype=torch.float64)
    mask = torch.ones(3, 1)
    x = LossInputs(new, torch.zeros(3, 1, dtype=torch.float64), advantages, mask, count_totals(mask))
    out = get_policy_loss("sapo")(x, LossSettings(tau_pos=0.5, tau_neg=4.0, aggregation="token-sum"))
    out.loss.backward()

    def gate(tau: float, ratio: float) -> float:
        return 1 / (1 + math.exp(-tau * (ratio - 1)))

    up, down = math.exp(0.3), math.exp(-0.2)
    wanted = -2 * gate(0.5, up) * 4 / 0.5 + 3 * gate(4.0, down) * 4 / 4.0
    assert out.loss.item() == pytest.approx(wanted, rel=1e-12)
    slopes = [-2 * 4 * gate(0.5, up) * (1 - gate(0.5, up)) * up, 3 * 4 * gate(4.0, down) * (1 - gate(4.0, down)) * down]
    assert new.grad.flatten().tolist() == pytest.approx([*slopes, 0.0], rel=1e-12)
