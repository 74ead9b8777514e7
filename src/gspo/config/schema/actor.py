"""The `actor_rollout_ref.actor` and `.ref` sections: the policy's loss, its updates, and the reference."""

from __future__ import annotations

from typing import Literal

from gspo.algo.settings import LOSSES, Aggregation, BehaviourMode, KLKind, RatioLevel
from gspo.config.schema.fields import Section, key
from gspo.config.schema.model import FSDPConfig, OptimConfig


class PolicyLossConfig(Section):
    """The policy loss by name, and constants that only some losses use."""

    loss_mode: str = key(default="gspo", doc="The policy loss.", built_in=LOSSES)
    tau_pos: float = key(default=1.0, doc="Loss sapo: temperature of the gate for positive advantages.", gt=0)
    tau_neg: float = key(default=1.05, doc="Loss sapo: temperature of the gate for all other advantages.", gt=0)
    clip_cov_ratio: float = key(
        default=0.0002, doc="Loss clip_cov: share of the tokens, at least one, whose gradient is removed.", gt=0, le=1
    )
    clip_cov_lb: float = key(default=1.0, doc="Loss clip_cov: least covariance of a token whose gradient is removed.")
    clip_cov_ub: float = key(
        default=5.0, doc="Loss clip_cov: greatest covariance of a token whose gradient is removed."
    )
    kl_cov_ratio: float = key(
        default=0.0002,
        doc="Loss kl_cov: share of the tokens, at least one, with the greatest covariance, which get the KL penalty.",
        gt=0,
        le=1,
    )
    ppo_kl_coef: float = key(default=0.1, doc="Loss kl_cov: weight of the KL penalty.", ge=0)


class ActorConfig(Section):
    """The policy: loss, clipping, mini-batches and optimiser. Mini-batch sizes count prompts."""

    strategy: Literal["local", "fsdp2"] = key(
        default="local",
        doc="local trains in one process. fsdp2 shards the models over several processes, one per device.",
        may_change_on_resume=True,
    )
    ppo_mini_batch_size: int = key(
        default=256,
        doc="Prompts per optimiser step. A training step makes data.train_batch_size / ppo_mini_batch_size optimiser "
        "steps per epoch. Where it is not set, or auto: a quarter of the batch.",
        gt=0,
        unit="prompts",
        auto=True,
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        default=None,
        doc="Responses per forward pass; null = fill forward passes by tokens. Setting it switches use_dynamic_bsz "
        "off, unless that key is set too.",
        gt=0,
        unit="responses",
    )
    use_dynamic_bsz: bool = key(
        default=True,
        doc="Fill each forward pass with up to ppo_max_token_len_per_gpu tokens instead of a fixed number of "
        "responses.",
    )
    ppo_max_token_len_per_gpu: int = key(
        default=16384,
        doc="Most tokens per forward pass in training. A longer sequence gets a forward pass to itself. Where it is not "
        "set, or auto: halved until the run fits into memory.",
        gt=0,
        unit="tokens",
        auto=True,
    )
    ppo_epochs: int = key(default=1, doc="Passes over each rollout batch.", gt=0)
    shuffle: bool = key(
        default=False,
        doc="Assign groups to mini-batches at random, anew for every step and epoch, for the critic too. false keeps "
        "the order in which they were sampled.",
    )
    policy_loss: PolicyLossConfig = key(factory=PolicyLossConfig, doc="The policy loss.")
    importance_sampling_level: RatioLevel | None = key(
        default=None,
        doc="token: a ratio for each token. sequence: one for the whole response. sequence_token: that of the response, "
        "with a gradient for each token. turn: one for each turn of an environment. null = the loss's default.",
    )
    clip_ratio: float | None = key(
        default=None,
        doc="Clip range ε on both sides of 1, for the sides that clip_ratio_low and clip_ratio_high do not set.",
        gt=0,
        example="3e-4",
    )
    clip_ratio_low: float | None = key(
        default=None,
        doc="Clip range ε below 1; null = clip_ratio, or the loss's default where that is null too.",
        gt=0,
        example="3e-4",
    )
    clip_ratio_high: float | None = key(
        default=None,
        doc="Clip range ε above 1; null = clip_ratio, or the loss's default where that is null too.",
        gt=0,
        example="4e-4",
    )
    clip_ratio_c: float | None = key(
        default=3.0,
        doc="Losses vanilla and dapo: dual clip, an upper bound of the ratio for negative advantages; null = no dual "
        "clip.",
        gt=1,
    )
    clip_target: float | None = key(
        default=None,
        doc="Clip fraction to hold by slowly changing the clip range; null = keep the range. The first mini-batch of a "
        "step, which cannot clip, does not count.",
        gt=0,
        lt=1,
    )
    clip_target_bounds: list[float] = key(
        factory=lambda: [0.1, 10.0], doc="Smallest and largest factor by which clip_target may change the clip range."
    )
    loss_agg_mode: Aggregation | None = key(
        default=None, doc="How the losses of the tokens are combined into one number; null = the loss's default."
    )
    loss_scale_factor: int | None = key(
        default=None,
        doc="Aggregation seq-mean-token-sum-norm: the fixed length to divide by; null = data.max_response_length.",
        gt=0,
        unit="tokens",
    )
    use_decoupled_loss: bool = key(
        default=False,
        doc="Multiply the loss of each token by π_old/μ, which corrects for responses that older weights wrote.",
    )
    behav_imp_weight_cap: float | None = key(
        default=None, doc="Decoupled loss: cap on the weight π_old/μ (AReaL uses 5.0); null = no cap.", gt=0
    )
    behav_imp_weight_mode: BehaviourMode = key(
        default="token_mask",
        doc="Decoupled loss: whether the weight is per token or per sequence (the geometric mean of its tokens' weights, "
        "or their product), and whether a weight above the cap becomes 0 (mask) or the cap (truncate).",
    )
    old_log_prob_source: Literal["recompute", "rollout", "first_pass"] = key(
        default="first_pass",
        doc="Where the log-probs of π_old come from. recompute: a separate forward pass before the updates. rollout: "
        "the engine. first_pass: as recompute, but the first mini-batch uses its own training pass, with the same "
        "bits.",
    )
    sft_weight: float = key(
        default=0.1,
        doc="Weight of the supervised loss on the answers of data.sft_files, their mean negative log-prob per token, which "
        "is added to the policy loss of each optimiser step.",
        ge=0,
    )
    entropy_coeff: float = key(
        default=0.0, doc="Weight of the entropy bonus, which is subtracted from the loss; 0 = none."
    )
    entropy_checkpointing: bool = key(
        default=False, doc="Recompute the entropy in the backward pass: saves memory, costs time."
    )
    use_kl_loss: bool = key(default=False, doc="Add a KL term against the reference model to the loss.")
    kl_loss_coef: float = key(default=0.001, doc="Weight of the KL term in the loss.", ge=0)
    kl_loss_type: KLKind = key(
        default="low_var_kl",
        doc="Estimator of the KL term in the loss, with d = log π_θ/π_ref of a token: kl and k1 are d, "
        "abs is |d|, mse and k2 are d²/2, low_var_kl and k3 are exp(-d) + d - 1; k1+ and k3+ have their value and the "
        "gradient of k2.",
    )
    grad_clip: float = key(default=1.0, doc="Largest gradient norm. Larger gradients are scaled down to it.", gt=0)
    optim: OptimConfig = key(factory=OptimConfig, doc="Optimiser of the policy.")
    fsdp_config: FSDPConfig = key(factory=FSDPConfig, doc="Sharding of the policy.")
    ulysses_sequence_parallel_size: int = key(
        default=1,
        doc="Ranks that share each sequence (strategy=fsdp2): each computes a part of the tokens, and in attention a part "
        "of the heads. For responses that are too long for one device. ppo_max_token_len_per_gpu then counts the tokens of "
        "each rank.",
        ge=1,
    )
    use_torch_compile: bool = key(
        default=True,
        doc="Compile the policy's layers when one process trains it. On a GPU in half precision, forward and backward "
        "passes are also captured as CUDA graphs. On a CPU it needs float32, 4 million parameters or more and a C++ "
        "compiler (CXX, else g++). Not used with LoRA or mixture-of-experts models.",
    )


class RefConfig(Section):
    """The frozen reference model, or the teacher; loaded only when a KL term or distillation is on."""

    path: str | None = key(
        default=None,
        doc="Folder or hub name of the reference model; null = the policy's weights at the start of the run.",
    )
    log_prob_micro_batch_size_per_gpu: int | None = key(
        default=None, doc="Responses per forward pass of the reference; null = as for the policy.", gt=0
    )
    log_prob_use_dynamic_bsz: bool | None = key(
        default=None,
        doc="Fill the reference's forward passes by tokens; null = decided by which of the two sizes is set, else as "
        "for the policy.",
    )
    log_prob_max_token_len_per_gpu: int | None = key(
        default=None,
        doc="Most tokens per forward pass of the reference; null = actor.ppo_max_token_len_per_gpu.",
        gt=0,
        unit="tokens",
    )
    fsdp_config: FSDPConfig = key(factory=FSDPConfig, doc="Sharding of the reference.")
