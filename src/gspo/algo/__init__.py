"""The algorithm layer: losses, advantages, KL and diagnostics as pure functions of tensors.

Three entry points are kept stable: `compute_policy_loss`, `compute_advantage`, `kl_penalty`. Losses and estimators
are added with the decorators `policy_loss` and `advantage_estimator`. Names load on first use, so that importing
`gspo.algo` or the torch-free `gspo.algo.settings` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gspo.algo.advantages import AdvantageInputs, advantage_estimator
    from gspo.algo.aggregation import aggregate, count_totals
    from gspo.algo.functional import compute_advantage, compute_policy_loss, kl_penalty
    from gspo.algo.kl import AdaptiveController, FixedController, make_controller
    from gspo.algo.losses import PolicyLoss, clipped_surrogate, get_policy_loss, policy_loss, ratio_band, reduce_loss
    from gspo.algo.ratios import importance_ratio
    from gspo.algo.settings import Behaviour, LossSettings

__all__ = [
    "AdaptiveController",
    "AdvantageInputs",
    "Behaviour",
    "FixedController",
    "LossSettings",
    "PolicyLoss",
    "advantage_estimator",
    "aggregate",
    "clipped_surrogate",
    "compute_advantage",
    "compute_policy_loss",
    "count_totals",
    "get_policy_loss",
    "importance_ratio",
    "kl_penalty",
    "make_controller",
    "policy_loss",
    "ratio_band",
    "reduce_loss",
]

_HOMES = {
    "advantages": ("AdvantageInputs", "advantage_estimator"),
    "aggregation": ("aggregate", "count_totals"),
    "functional": ("compute_advantage", "compute_policy_loss", "kl_penalty"),
    "kl": ("AdaptiveController", "FixedController", "make_controller"),
    "losses": ("PolicyLoss", "clipped_surrogate", "get_policy_loss", "policy_loss", "ratio_band", "reduce_loss"),
    "ratios": ("importance_ratio",),
    "settings": ("Behaviour", "LossSettings"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME_OF[name]}"), name)
