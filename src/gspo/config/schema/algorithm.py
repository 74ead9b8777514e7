"""The `algorithm` section: advantages, KL in the reward, dynamic sampling."""

from __future__ import annotations

from typing import Literal

from gspo.algo.settings import ESTIMATORS, KLKind
from gspo.config.schema.fields import Section, key, section


@section
class FilterGroupsConfig(Section):
    """Dynamic sampling: groups whose responses all earned the same carry no gradient and are replaced."""

    enable: bool = key(
        default=False, doc="Train only on groups whose responses differ in `metric`; needs rollout.n > 1."
    )
    metric: str = key(
        default="seq_reward",
        doc="What must differ within a group: seq_reward (score before KL), seq_final_reward (after KL), acc, score, or "
        "any number the reward function returns.",
    )
    function: str | None = key(
        default=None,
        doc="A function Group -> bool that decides which groups are kept, in place of `metric`: a registered name or "
        "module:function (docs/extend.md); null = the built-in rule.",
    )
    max_num_gen_batches: int = key(
        default=0,
        doc="Generation batches a training step may use before `on_limit`; <= 0 is unlimited with a no-progress guard.",
    )
    strategy: Literal["stream", "rounds"] = key(
        default="stream",
        doc="stream refills a slot when a group ends and carries surplus groups over; rounds generates whole batches.",
    )
    max_staleness: int = key(
        default=2,
        doc="stream: oldest weights version, counted back from now, that a carried group may have.",
        ge=0,
        unit="steps",
    )
    on_limit: Literal["raise", "train_partial", "keep_unfiltered"] = key(
        default="raise",
        doc="What happens at max_num_gen_batches or without progress: stop, train on fewer groups, or on unfiltered ones.",
    )
    max_in_flight: int | None = key(
        default=None,
        doc="stream: groups generated at once; null = data.gen_batch_size, never above the staleness budget.",
        ge=1,
    )
    predict: Literal["off", "skip"] = key(
        default="off",
        doc="skip passes over prompts that the ledger expects to be all right or all wrong; off is the exact method.",
    )
    predict_weight: bool = key(
        default=False, doc="predict=skip: weigh a kept group by 1/q, which removes the skipping's bias."
    )
    predict_min_prob: float = key(
        default=0.1, doc="predict=skip: smallest probability of submitting a prompt.", gt=0, le=1
    )
    predict_discount: float = key(
        default=0.9,
        doc="predict=skip: weight of a prompt's older outcomes in the ledger, per visit.",
        gt=0,
        le=1,
    )


@section
class KLControlConfig(Section):
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = key(
        default="fixed",
        doc="fixed keeps kl_coef; adaptive moves it to hold target_kl.",
    )
    kl_coef: float = key(
        default=0.001, doc="Coefficient (initial value when adaptive) of the KL penalty in the reward.", ge=0
    )
    target_kl: float = key(default=0.1, doc="adaptive: the KL to hold.", gt=0)
    horizon: int = key(
        default=10000, doc="adaptive: how slowly the coefficient moves.", gt=0, unit="sequences"
    )


@section
class AlgoConfig(Section):
    """How rewards become advantages, and which groups are trained on."""

    adv_estimator: str = key(
        default="grpo",
        doc="Advantage estimator, or the name of one registered by the user.",
        built_in=ESTIMATORS,
    )
    gamma: float = key(default=1.0, doc="Discount of rewards over tokens.", ge=0, le=1)
    lam: float = key(default=1.0, doc="GAE's lambda: bias (0) against variance (1).", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = key(
        default=True, doc="Divide GRPO's advantages by the group's std; false is Dr.GRPO."
    )
    use_kl_in_reward: bool = key(
        default=False, doc="Subtract a KL penalty against the reference from the reward."
    )
    kl_penalty: KLKind = key(default="kl", doc="Estimator of that KL.")
    kl_ctrl: KLControlConfig = key(
        factory=KLControlConfig, doc="Controller of the KL coefficient in the reward."
    )
    filter_groups: FilterGroupsConfig = key(factory=FilterGroupsConfig, doc="Dynamic sampling.")
