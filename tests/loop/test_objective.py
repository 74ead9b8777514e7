"""What travels to the ranks in place of functions: small values, with every default filled in."""

from __future__ import annotations

import pickle

import pytest
import torch

from gspo.algo import compute_policy_loss, count_totals, get_policy_loss, policy_loss
from gspo.algo.losses import POLICY_LOSSES
from gspo.algo.objective import BoundLoss, BoundRegulariser
from gspo.algo.settings import LossSettings
from gspo.types import LossInputs

MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
NEW, OLD = torch.tensor([[-1.0, -0.5, 0.0], [-0.2, -3.0, -1.0]]), -torch.ones(2, 3)
ADVANTAGES = torch.tensor([[1.0], [-0.5]]).expand(2, 3)


def test_a_bound_loss_is_the_loss_of_that_name_and_settings():
    bound = BoundLoss("gspo", LossSettings(clip_low=0.1))
    out = bound(LossInputs(NEW, OLD, ADVANTAGES, MASK, count_totals(MASK)))
    wanted, _ = compute_policy_loss("gspo", NEW, OLD, ADVANTAGES, MASK, clip_ratio_low=0.1)
    assert torch.equal(out.loss, wanted)


def test_defaults_are_filled_in_once_where_the_loss_is_bound(monkeypatch):
    monkeypatch.setattr(POLICY_LOSSES, "_items", dict(POLICY_LOSSES._items))
    seen = []

    @policy_loss("of_this_test", clip_low=0.3, levels=("token",))
    def loss(x, settings):
        seen.append(settings)
        return get_policy_loss("vanilla").formula(x, settings)

    bound = BoundLoss("of_this_test", LossSettings(clip_high=0.4))
    for _ in range(2):
        bound(LossInputs(NEW, OLD, ADVANTAGES, MASK, count_totals(MASK)))
    assert seen[0] is seen[1] is bound.settings
    assert (bound.settings.clip_low, bound.settings.clip_high, bound.settings.level) == (0.3, 0.4, "token")
    with pytest.raises(ValueError, match="importance_sampling_level=sequence cannot be used"):
        BoundLoss("of_this_test", LossSettings(level="sequence"))


@pytest.mark.parametrize(
    "value",
    [BoundLoss("gspo", LossSettings()), BoundRegulariser("token-mean", kl_coef=0.1, kl_kind="k2", entropy_coeff=0.01)],
    ids=lambda value: type(value).__name__,
)
def test_they_travel_as_plain_numbers(value):
    data = pickle.dumps(value)
    assert pickle.loads(data) == value and len(data) < 1000
