"""The names, defaults and settings of losses and estimators, as plain data.

This module imports no torch: the registries and the config read the same tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

RatioLevel = Literal["token", "sequence", "sequence_token", "turn"]
Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm", "token-sum"]
BehaviourMode = Literal[
    "token_mask",
    "token_truncate",
    "sequence_mask",
    "sequence_truncate",
    "sequence_product_mask",
    "sequence_product_truncate",
]
KLKind = Literal["kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "k1+", "k3+"]

RATIO_LEVELS: tuple[str, ...] = get_args(RatioLevel)
AGGREGATIONS: tuple[str, ...] = get_args(Aggregation)
BEHAVIOUR_MODES: tuple[str, ...] = get_args(BehaviourMode)
KL_KINDS: tuple[str, ...] = get_args(KLKind)
SEQUENCE_LEVELS = ("sequence", "sequence_token", "turn")  # ratios that are means over many tokens


@dataclass(frozen=True, slots=True)
class LossDefaults:
    """The defaults of a loss. `levels` are the ratio levels that it supports; the first is the default."""

    clip_low: float = 0.2
    clip_high: float = 0.2
    aggregation: str = "token-mean"
    levels: tuple[str, ...] = RATIO_LEVELS
    clips: bool = True  # otherwise the range is only what clip fractions are counted against


LOSSES: dict[str, LossDefaults] = {
    "gspo": LossDefaults(3e-4, 4e-4, "seq-mean-token-mean", ("sequence", "turn")),
    "gspo_token": LossDefaults(3e-4, 4e-4, "seq-mean-token-mean", ("sequence_token",)),
    "vanilla": LossDefaults(0.2, 0.2),
    "dapo": LossDefaults(0.2, 0.28),
    "cispo": LossDefaults(0.2, 0.28),
    "geo_mean": LossDefaults(0.4, 0.4, "seq-mean-token-mean", ("token",)),
    "sapo": LossDefaults(aggregation="seq-mean-token-mean", clips=False),
    "clip_cov": LossDefaults(0.2, 0.2, levels=("token",)),
    "kl_cov": LossDefaults(levels=("token",), clips=False),
    "gpg": LossDefaults(levels=("token",), clips=False),
}
ESTIMATORS = (
    "grpo",
    "dr_grpo",
    "grpo_passk",
    "gpg",
    "rloo",
    "opo",
    "reinforce_plus_plus",
    "reinforce_plus_plus_baseline",
    "remax",
    "gae",
    "opd",
)


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How the decoupled loss weighs tokens by w = π_old/μ; `cap=None` applies w uncapped."""

    mode: str = "token_mask"
    cap: float | None = None

    def __post_init__(self) -> None:
        _require_choice("behav_imp_weight_mode", self.mode, BEHAVIOUR_MODES)
        if self.cap is not None and not self.cap > 0:
            raise ValueError(f"behav_imp_weight_cap={self.cap}: expected a number above 0, or None for no cap")


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The user's settings of a policy loss; None is the loss's default.

    `clip_c` is the dual-clip bound of `vanilla` and `dapo` (None switches it off); `norm_length` is the fixed length
    of `seq-mean-token-sum-norm`; `tau_pos`/`tau_neg` belong to `sapo`, `clip_cov_*` to `clip_cov`, `kl_cov_ratio` and
    `kl_cov_coef` to `kl_cov`; `behaviour` switches the decoupled loss on.
    """

    clip_low: float | None = None
    clip_high: float | None = None
    clip_c: float | None = 3.0
    aggregation: str | None = None
    norm_length: float | None = None
    level: str | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    clip_cov_ratio: float = 0.0002
    clip_cov_bounds: tuple[float, float] = (1.0, 5.0)
    kl_cov_ratio: float = 0.0002
    kl_cov_coef: float = 0.1
    behaviour: Behaviour | None = None

    def __post_init__(self) -> None:
        for key, value in (("clip_ratio_low", self.clip_low), ("clip_ratio_high", self.clip_high)):
            if value is not None and not value >= 0:
                raise ValueError(f"{key}={value}: expected a number of at least 0, or None for the loss's default")
        if self.clip_c is not None and not self.clip_c > 1:
            raise ValueError(f"clip_ratio_c={self.clip_c}: expected a number above 1, or None for no dual clip")
        for key, value in (("tau_pos", self.tau_pos), ("tau_neg", self.tau_neg)):
            if not value > 0:
                raise ValueError(f"{key}={value}: expected a number above 0")
        if self.aggregation is not None:
            _require_choice("loss_agg_mode", self.aggregation, AGGREGATIONS)
        if self.level is not None:
            _require_choice("importance_sampling_level", self.level, RATIO_LEVELS)
        if self.norm_length is not None and not self.norm_length > 0:
            raise ValueError(f"loss_scale_factor={self.norm_length}: expected a length above 0")
        if self.aggregation == "seq-mean-token-sum-norm" and self.norm_length is None:
            raise ValueError(
                "loss_agg_mode=seq-mean-token-sum-norm needs a fixed length: set loss_scale_factor, "
                "for example to the response length limit"
            )


def length_weighting_note(loss_mode: str, aggregation: str | None) -> str | None:
    """A note for aggregations with which GSPO gives long answers more weight; None for others."""
    if loss_mode not in ("gspo", "gspo_token") or aggregation in (None, "seq-mean-token-mean"):
        return None
    return (
        f"loss_agg_mode={aggregation} with loss_mode={loss_mode} weighs every sequence by its length; "
        "GSPO as published uses seq-mean-token-mean"
    )


def _require_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{key}={value!r}: expected one of {', '.join(choices)}")
