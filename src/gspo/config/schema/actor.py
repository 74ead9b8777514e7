"""The `actor_rollout_ref.actor` and `.ref` sections: the policy's loss, its updates, and the reference."""

from __future__ import annotations

from typing import Literal

from gspo.algo.settings import LOSSES, Aggregation, BehaviourMode, KLKind, RatioLevel
from gspo.config.schema.fields import Section, key, section
from gspo.config.schema.model import FSDPConfig, OptimConfig


@section
class PolicyLossConfig(Section):
    """The policy loss by name, and the constants of single losses."""

    loss_mode: str = key(
        default="gspo",
        doc="Policy loss, or the name of one registered by the user.",
        built_in=LOSSES,
    )
    tau_pos: float = key(
        default=1.0, doc="sapo: temperature of the gate where the advantage is positive.", gt=0
    )
    tau_neg: float = key(
        default=1.05, doc="sapo: temperature of the gate where the advantage is negative.", gt=0
    )


@section
class ActorConfig(Section):
    """The policy: loss, clipping, mini-batches and optimiser. Mini-batch sizes count prompts."""

    strategy: Literal["local", "fsdp2"] = key(
        default="local",
        doc="local trains in this process; fsdp2 shards over devices.",
        may_change_on_resume=True,
    )
    ppo_mini_batch_size: int = key(
        default=256,
        doc="Prompts an optimiser step; train_batch_size / this = optimiser steps a rollout batch.",
        gt=0,
        unit="prompts",
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        default=None,
        doc="Responses a forward when use_dynamic_bsz is off; null = by token budget.",
        gt=0,
        unit="responses",
    )
    use_dynamic_bsz: bool = key(default=True, doc="Fill each forward up to ppo_max_token_len_per_gpu tokens.")
    ppo_max_token_len_per_gpu: int = key(
        default=16384, doc="Token budget of a training forward.", gt=0, unit="tokens"
    )
    ppo_epochs: int = key(default=1, doc="Passes over each rollout batch.", gt=0)
    shuffle: bool = key(
        default=False,
        doc="Draw the groups of each mini-batch anew for every step and epoch, also for the critic; false keeps the "
        "order in which they were sampled.",
    )
    policy_loss: PolicyLossConfig = key(factory=PolicyLossConfig, doc="The policy loss.")
    importance_sampling_level: RatioLevel | None = key(
        default=None,
        doc="Ratio per token, sequence or sequence_token; null = as the loss says.",
    )
    clip_ratio: float | None = key(
        default=None, doc="ε for both sides where clip_ratio_low / _high are not set.", gt=0
    )
    clip_ratio_low: float | None = key(
        default=None, doc="ε below 1; null = clip_ratio, else the loss's own default.", gt=0
    )
    clip_ratio_high: float | None = key(
        default=None, doc="ε above 1; null = clip_ratio, else the loss's own default.", gt=0
    )
    clip_ratio_c: float | None = key(
        default=3.0,
        doc="vanilla, dapo: the dual clip, a bound where the advantage is negative; null = none.",
        gt=1,
    )
    clip_target: float | None = key(
        default=None,
        doc="Clip fraction to hold by moving ε slowly; null keeps ε. Counted from the second mini-batch on.",
        gt=0,
        lt=1,
    )
    clip_target_bounds: list[float] = key(
        factory=lambda: [0.1, 10.0], doc="Smallest and largest factor by which clip_target may change ε."
    )
    loss_agg_mode: Aggregation | None = key(
        default=None, doc="How token losses become one number; null = as the loss says."
    )
    loss_scale_factor: int | None = key(
        default=None,
        doc="seq-mean-token-sum-norm: the fixed length; null = data.max_response_length.",
        gt=0,
        unit="tokens",
    )
    use_decoupled_loss: bool = key(
        default=False, doc="Weigh the loss by π_old/μ: corrects for rollouts of older weights."
    )
    behav_imp_weight_cap: float | None = key(
        default=None, doc="Decoupled loss: cap of that weight (AReaL uses 5.0); null = uncapped.", gt=0
    )
    behav_imp_weight_mode: BehaviourMode = key(
        default="token_mask",
        doc="What the cap does, and whether per token or per sequence.",
    )
    old_log_prob_source: Literal["recompute", "rollout", "first_pass"] = key(
        default="first_pass",
        doc="Where π_old comes from: a forward of its own for all mini-batches, the rollout engine, or such a forward "
        "for all but the first, whose update computes the same bits.",
    )
    entropy_coeff: float = key(default=0.0, doc="Weight of the entropy bonus.")
    entropy_checkpointing: bool = key(
        default=False, doc="Recompute the entropy in the backward: less memory."
    )
    use_kl_loss: bool = key(default=False, doc="Add a KL term against the reference to the loss.")
    kl_loss_coef: float = key(default=0.001, doc="Weight of that term.", ge=0)
    kl_loss_type: KLKind = key(default="low_var_kl", doc="Estimator of that KL.")
    grad_clip: float = key(default=1.0, doc="Largest gradient norm; larger ones are scaled down.", gt=0)
    optim: OptimConfig = key(factory=OptimConfig, doc="Optimiser of the policy.")
    fsdp_config: FSDPConfig = key(factory=FSDPConfig, doc="Sharding of the policy.")
    ulysses_sequence_parallel_size: int = key(
        default=1, doc="Devices that share one sequence. Only 1 is supported.", ge=1
    )
    use_torch_compile: bool = key(
        default=True,
        doc="One GPU, half precision: compile the layers and capture forward and backward as CUDA graphs. One CPU "
        "process, float32, 4 million parameters or more and a C++ compiler (CXX, else g++): compile the layers. Not "
        "with LoRA or experts.",
    )


@section
class RefConfig(Section):
    """The frozen reference: used when a KL term is on."""

    path: str | None = key(default=None, doc="Reference model; null = the policy's weights at the start.")
    log_prob_micro_batch_size_per_gpu: int | None = key(
        default=None, doc="Responses a forward; null = by token budget.", gt=0
    )
    log_prob_use_dynamic_bsz: bool | None = key(
        default=None, doc="Fill each forward by tokens; null = actor.use_dynamic_bsz."
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        default=None,
        doc="Token budget of a forward; null = actor.ppo_max_token_len_per_gpu.",
        gt=0,
        unit="tokens",
    )
    fsdp_config: FSDPConfig = key(factory=FSDPConfig, doc="Sharding of the reference.")
