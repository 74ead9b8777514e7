"""The objective that a config asks for, with every `null` filled in. Pure Python: no model library is needed."""

from __future__ import annotations

from dataclasses import dataclass

from gspo.config.schema import ActorConfig


@dataclass(frozen=True, slots=True)
class LossDefaults:
    """What a loss uses where the config says null; the first level is its default."""

    levels: tuple[str, ...]
    clip: tuple[float, float]
    aggregation: str
    clips: bool = True  # otherwise the range is only what clip fractions count against


_ANY = ("token", "sequence", "sequence_token")
LOSS_DEFAULTS: dict[str, LossDefaults] = {
    "gspo": LossDefaults(("sequence",), (3e-4, 4e-4), "seq-mean-token-mean"),
    "gspo_token": LossDefaults(("sequence_token",), (3e-4, 4e-4), "seq-mean-token-mean"),
    "vanilla": LossDefaults(_ANY, (0.2, 0.2), "token-mean"),
    "dapo": LossDefaults(_ANY, (0.2, 0.28), "token-mean"),
    "cispo": LossDefaults(_ANY, (0.2, 0.28), "token-mean"),
    "geo_mean": LossDefaults(("token",), (0.4, 0.4), "seq-mean-token-mean"),
    "sapo": LossDefaults(_ANY, (0.2, 0.2), "seq-mean-token-mean", clips=False),
}
LOSS_OF_LEVEL = {"token": "vanilla", "sequence": "gspo", "sequence_token": "gspo_token"}
SEQUENCE_LEVELS = ("sequence", "sequence_token")


@dataclass(frozen=True, slots=True)
class Objective:
    """Loss, ratio level, clip range and aggregation as they will be used."""

    loss_mode: str
    level: str
    clip: tuple[float, float]
    aggregation: str
    clips: bool

    @property
    def is_sequence_level(self) -> bool:
        return self.level in SEQUENCE_LEVELS


def objective_of(actor: ActorConfig) -> Objective:
    """The objective of an actor section. A loss registered by the user is taken to have `vanilla`'s defaults."""
    mode = actor.policy_loss.loss_mode
    own = LOSS_DEFAULTS.get(mode, LOSS_DEFAULTS["vanilla"])
    low, high = (actor.clip_ratio or side for side in own.clip)
    clip = (actor.clip_ratio_low or low, actor.clip_ratio_high or high)
    level = actor.importance_sampling_level or own.levels[0]
    return Objective(mode, level, clip, actor.loss_agg_mode or own.aggregation, own.clips)
