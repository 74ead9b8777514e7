"""The objective that a config asks for, with every `null` filled in. Pure Python: no model library is needed."""

from __future__ import annotations

from dataclasses import dataclass

from gspo.config.schema import ActorConfig


@dataclass(frozen=True, slots=True)
class LossDefaults:
    """What a loss uses where the config says null. `clip` is None for losses that do not clip."""

    level: str
    clip: tuple[float, float] | None
    aggregation: str


LOSS_DEFAULTS: dict[str, LossDefaults] = {
    "gspo": LossDefaults("sequence", (3e-4, 4e-4), "seq-mean-token-mean"),
    "gspo_token": LossDefaults("sequence_token", (3e-4, 4e-4), "seq-mean-token-mean"),
    "vanilla": LossDefaults("token", (0.2, 0.2), "token-mean"),
    "dapo": LossDefaults("token", (0.2, 0.28), "token-mean"),
    "cispo": LossDefaults("token", (0.2, 0.28), "token-mean"),
    "geo_mean": LossDefaults("token", (0.4, 0.4), "seq-mean-token-mean"),
    "sapo": LossDefaults("token", None, "seq-mean-token-mean"),
}
LOSS_OF_LEVEL = {"token": "vanilla", "sequence": "gspo", "sequence_token": "gspo_token"}
SEQUENCE_LEVELS = ("sequence", "sequence_token")


@dataclass(frozen=True, slots=True)
class Objective:
    """Loss, ratio level, clip range and aggregation as they will be used."""

    loss_mode: str
    level: str
    clip: tuple[float, float] | None
    aggregation: str

    @property
    def is_sequence_level(self) -> bool:
        return self.level in SEQUENCE_LEVELS


def objective_of(actor: ActorConfig) -> Objective:
    """The objective of an actor section. A loss registered by the user is taken to be of token level."""
    mode = actor.policy_loss.loss_mode
    own = LOSS_DEFAULTS.get(mode, LOSS_DEFAULTS["vanilla"])
    clip = own.clip
    if clip is not None:
        low, high = (actor.clip_ratio or side for side in clip)
        clip = (actor.clip_ratio_low or low, actor.clip_ratio_high or high)
    return Objective(
        mode, actor.importance_sampling_level or own.level, clip, actor.loss_agg_mode or own.aggregation
    )
