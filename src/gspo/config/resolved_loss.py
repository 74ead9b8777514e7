"""The policy loss of a config, with every `null` filled in. Pure Python: no model library is needed."""

from __future__ import annotations

from dataclasses import dataclass

from gspo.algo.settings import LOSSES, SEQUENCE_LEVELS
from gspo.config.schema.actor import ActorConfig


@dataclass(frozen=True, slots=True)
class ResolvedLoss:
    """Loss, ratio level, clip range and aggregation as they will be used."""

    loss_mode: str
    level: str
    clip: tuple[float, float]
    aggregation: str
    clips: bool

    def __str__(self) -> str:
        """`gspo: sequence ratio, clipped to [1 - 0.0003, 1 + 0.0004]`; of a loss that the user registered its name."""
        if self.loss_mode not in LOSSES:
            return self.loss_mode
        clip = f"clipped to [1 - {self.clip[0]:g}, 1 + {self.clip[1]:g}]" if self.clips else "no clip"
        return f"{self.loss_mode}: {self.level} ratio, {clip}"

    @property
    def is_sequence_level(self) -> bool:
        return self.level in SEQUENCE_LEVELS


def resolved_loss(actor: ActorConfig) -> ResolvedLoss:
    """The loss of an actor section. A loss that the user registered is assumed to have the defaults of `vanilla`."""
    mode = actor.policy_loss.loss_mode
    defaults = LOSSES.get(mode, LOSSES["vanilla"])
    clip = (
        actor.clip_ratio_low or actor.clip_ratio or defaults.clip_low,
        actor.clip_ratio_high or actor.clip_ratio or defaults.clip_high,
    )
    level = actor.importance_sampling_level or defaults.levels[0]
    return ResolvedLoss(mode, level, clip, actor.loss_agg_mode or defaults.aggregation, defaults.clips)
