"""The `algorithm` section: advantages, KL in the reward, dynamic sampling."""

from __future__ import annotations

from typing import Literal

from gspo.algo.settings import ESTIMATORS, KLKind
from gspo.config.schema.fields import Section, key


class FilterGroupsConfig(Section):
    """Dynamic sampling: groups whose responses all have the same reward give no gradient and are replaced."""

    enable: bool = key(
        default=False,
        doc="Train only on groups whose responses differ in `metric`, and generate more groups to replace the others. "
        "Needs rollout.n of 2 or more.",
    )
    metric: str = key(
        default="seq_reward",
        doc="What must differ within a group: seq_reward or score (the reward before KL), seq_final_reward (after KL), "
        "acc, or any other number that the reward function returns. Where it is not set, or auto, and the reward function "
        "does not return a recipe's metric: seq_reward.",
        auto=True,
    )
    min_spread: float = key(
        default=0.0,
        doc="How much the greatest and the smallest `metric` of a group must differ for it to be kept, for rewards with "
        "noise. 0 = they must not be equal.",
        ge=0,
    )
    function: str | None = key(
        default=None,
        doc="A function Group -> bool that decides which groups are kept, in place of `metric`: a registered name or "
        "module:function; null = the built-in rule.",
    )
    max_num_gen_batches: int = key(
        default=0,
        doc="Most generation batches per training step; then `on_limit` applies. 0 or less = no limit, but sampling "
        "that makes no progress still stops.",
    )
    strategy: Literal["stream", "rounds"] = key(
        default="stream",
        doc="stream starts a new group whenever one ends and carries surplus groups over to later steps. rounds "
        "generates whole generation batches.",
    )
    max_staleness: int = key(
        default=2,
        doc="Strategy stream: greatest age, in training steps, of the weights that generated a carried group; 0 = "
        "carry none.",
        ge=0,
        unit="steps",
    )
    on_limit: Literal["raise", "train_partial", "keep_unfiltered"] = key(
        default="raise",
        doc="What happens at max_num_gen_batches or without progress: stop the run (raise), train on the groups found "
        "so far (train_partial), or fill the batch with filtered groups (keep_unfiltered).",
    )
    max_in_flight: int | None = key(
        default=None,
        doc="Strategy stream: most groups in generation at once; null = the larger of data.gen_batch_size and "
        "data.train_batch_size. max_staleness limits it further.",
        ge=1,
    )
    predict: Literal["off", "skip"] = key(
        default="off",
        doc="skip leaves out some prompts whose earlier groups were all right or all wrong. off generates for every "
        "prompt.",
    )
    predict_weight: bool = key(
        default=False,
        doc="With predict=skip: weight each kept group by 1 / its probability of being generated, which removes the "
        "bias of skipping.",
    )
    predict_min_prob: float = key(
        default=0.1, doc="With predict=skip: smallest probability of generating for a prompt.", gt=0, le=1
    )
    predict_discount: float = key(
        default=0.9,
        doc="With predict=skip: factor by which a prompt's earlier results lose weight each time it is seen.",
        gt=0,
        le=1,
    )


class KLControlConfig(Section):
    """The coefficient of the KL penalty in the reward."""

    type: Literal["fixed", "adaptive"] = key(
        default="fixed", doc="fixed keeps kl_coef; adaptive changes it to hold the KL at target_kl."
    )
    kl_coef: float = key(
        default=0.001, doc="Coefficient of the KL penalty in the reward; the initial value when adaptive.", ge=0
    )
    target_kl: float = key(default=0.1, doc="With type=adaptive: the KL per token to hold.", gt=0)
    horizon: int = key(
        default=10000,
        doc="With type=adaptive: number of sequences over which the coefficient adapts. Larger is slower.",
        gt=0,
        unit="sequences",
    )


class AlgoConfig(Section):
    """How rewards become advantages, and which groups are trained on."""

    adv_estimator: str = key(default="grpo", doc="How advantages are estimated from rewards.", built_in=ESTIMATORS)
    gamma: float = key(default=1.0, doc="Discount factor of rewards per token.", ge=0, le=1)
    lam: float = key(default=1.0, doc="λ of GAE: 0 has the least variance, 1 the least bias.", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = key(
        default=True, doc="Divide GRPO's advantages by the standard deviation of the group's rewards; false is Dr.GRPO."
    )
    std_level: Literal["group", "batch"] = key(
        default="group",
        doc="With norm_adv_by_std_in_grpo: whether the standard deviation is that of the group's rewards or of the whole "
        "batch's.",
    )
    normalize_advantages: bool = key(
        default=False,
        doc="Whiten the advantages over the trained tokens of the batch: subtract their mean, divide by their standard "
        "deviation. gae and reinforce_plus_plus always do.",
    )
    mask_truncated: bool = key(
        default=False,
        doc="Leave responses that were cut at the length limit out of the loss. They still count in their group's "
        "baseline.",
    )
    turn_rewards: Literal["outcome", "return_to_go"] = key(
        default="outcome",
        doc="With an environment: outcome adds a rollout's rewards up and adv_estimator makes one advantage of them. "
        "return_to_go gives each turn the rewards that follow it, minus the mean of the siblings at the same turn; it "
        "needs the loss gspo_token or importance_sampling_level token or turn.",
    )
    turn_discount: float = key(
        default=1.0, doc="With turn_rewards=return_to_go: discount factor of rewards per turn.", ge=0, le=1
    )
    mask_malformed_turns: bool = key(
        default=False, doc="With an environment: leave turns out of the loss whose tool call could not be read."
    )
    distill_weight: float = key(
        default=0.0,
        doc="Weight of log π_teacher - log π_old, which is added to the advantage of each token; the teacher is the "
        "reference (actor_rollout_ref.ref.path). 0 = no teacher. adv_estimator=opd uses it alone, without a reward.",
        ge=0,
    )
    use_kl_in_reward: bool = key(
        default=False, doc="Subtract a KL penalty against the reference model from the reward."
    )
    kl_penalty: KLKind = key(
        default="kl",
        doc="Estimator of the KL penalty in the reward, with d = log π_θ/π_ref of a token: kl and k1 are d, "
        "abs is |d|, mse and k2 are d²/2, low_var_kl and k3 are exp(-d) + d - 1; k1+ and k3+ have their value and the "
        "gradient of k2.",
    )
    kl_ctrl: KLControlConfig = key(factory=KLControlConfig, doc="Controller of the KL coefficient in the reward.")
    filter_groups: FilterGroupsConfig = key(factory=FilterGroupsConfig, doc="Dynamic sampling.")
