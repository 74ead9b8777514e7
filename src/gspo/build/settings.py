"""The settings of the sampler, the evaluator and the objective, with every default filled in."""

from __future__ import annotations

import functools
from typing import Any

from gspo.algo.controllers import ClipController
from gspo.algo.functional import compute_advantage
from gspo.algo.losses import get_policy_loss
from gspo.algo.objective import BoundRegulariser, Objective
from gspo.algo.settings import Behaviour, LossSettings
from gspo.build.environments import has_environment
from gspo.config import TrainerConfig
from gspo.data.rows import DataError
from gspo.distributed.run_layout import runs_ahead
from gspo.rollout.engine import SamplingParams
from gspo.sampling.settings import SamplingSettings


def total_steps(config: TrainerConfig, num_prompts: int) -> int:
    """Training steps of a run over that many prompts."""
    if config.trainer.total_training_steps:
        return config.trainer.total_training_steps
    per_epoch = num_prompts // config.data.train_batch_size
    if per_epoch == 0:
        raise DataError(
            "data.train_batch_size",
            f"is {config.data.train_batch_size}, more than the {num_prompts} training prompts; lower it, or set "
            "trainer.total_training_steps: then a step uses prompts more than once",
        )
    return per_epoch * config.trainer.total_epochs


def training_params(config: TrainerConfig) -> SamplingParams:
    """How tokens of training groups are drawn."""
    rollout = config.actor_rollout_ref.rollout
    return SamplingParams(
        max_tokens=_max_tokens(config),
        temperature=rollout.temperature,
        top_k=rollout.top_k,
        top_p=rollout.top_p,
        ignore_eos=rollout.ignore_eos,
    )


def validation_params(config: TrainerConfig) -> SamplingParams:
    """How tokens of held-out answers are drawn."""
    val = config.actor_rollout_ref.rollout.val_kwargs
    return SamplingParams(
        max_tokens=_max_tokens(config),
        temperature=val.temperature if val.do_sample else 0.0,
        top_k=val.top_k,
        top_p=val.top_p,
    )


def _max_tokens(config: TrainerConfig) -> int:
    return config.actor_rollout_ref.rollout.response_length or config.data.max_response_length


def sampling_settings(config: TrainerConfig, reward_lag: int = 1, environment: Any = None) -> SamplingSettings:
    """How training groups are drawn and filtered. `environment` is an object that replaces the one of the config."""
    f, data, rollout = config.algorithm.filter_groups, config.data, config.actor_rollout_ref.rollout
    has_turns = has_environment(config, environment)
    return SamplingSettings(
        train_batch_size=data.train_batch_size,
        n=rollout.n,
        params=training_params(config),
        gen_batch_size=data.gen_batch_size,
        enable=f.enable,
        metric=f.metric,
        min_spread=f.min_spread,
        strategy=f.strategy,
        max_num_gen_batches=f.max_num_gen_batches,
        on_limit=f.on_limit,
        max_staleness=_max_staleness(config),
        max_in_flight=groups_held(config, rollout.num_workers) if runs_ahead(config) else f.max_in_flight,
        predict=f.predict,
        predict_weight=f.predict_weight,
        predict_min_prob=f.predict_min_prob,
        predict_discount=f.predict_discount,
        max_failure_rate=(config.environment if has_turns else config.reward).max_failure_rate,
        reward_lag=reward_lag,
    )


def _max_staleness(config: TrainerConfig) -> int:
    """How many versions a group may lag behind: the bound of asynchronous rollouts, else of carried groups."""
    rollout, filters = config.actor_rollout_ref.rollout, config.algorithm.filter_groups
    if rollout.mode == "async":
        return rollout.max_head_offpolicyness
    return filters.max_staleness if filters.enable else 0  # without filtering there is nothing to save


def groups_held(config: TrainerConfig, workers: int) -> int:
    """Groups in flight when rollouts run ahead: by key, else as many as the workers generate at once."""
    rollout = config.actor_rollout_ref.rollout
    return rollout.max_concurrent_rollouts or max(1, workers * rollout.max_num_seqs // rollout.n)


def build_objective(config: TrainerConfig) -> Objective:
    """The objective, with every default of its loss filled in."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    loss = actor.policy_loss
    settings = LossSettings(
        clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_c=actor.clip_ratio_c,
        aggregation=actor.loss_agg_mode,
        norm_length=actor.loss_scale_factor or config.data.max_response_length,
        level=actor.importance_sampling_level,
        tau_pos=loss.tau_pos,
        tau_neg=loss.tau_neg,
        clip_cov_ratio=loss.clip_cov_ratio,
        clip_cov_bounds=(loss.clip_cov_lb, loss.clip_cov_ub),
        kl_cov_ratio=loss.kl_cov_ratio,
        kl_cov_coef=loss.ppo_kl_coef,
        behaviour=Behaviour(actor.behav_imp_weight_mode, actor.behav_imp_weight_cap)
        if actor.use_decoupled_loss
        else None,
    )
    resolved = get_policy_loss(loss.loss_mode).resolve(settings)
    assert resolved.aggregation is not None
    return Objective(
        loss_mode=loss.loss_mode,
        settings=resolved,
        advantage=functools.partial(
            compute_advantage,
            algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            std_level=algorithm.std_level,
        ),
        clip_control=ClipController(actor.clip_target, (actor.clip_target_bounds[0], actor.clip_target_bounds[1])),
        regulariser=BoundRegulariser(
            resolved.aggregation,
            resolved.norm_length,
            kl_coef=actor.kl_loss_coef if actor.use_kl_loss else 0.0,
            kl_kind=actor.kl_loss_type,
            entropy_coeff=actor.entropy_coeff,
        ),
        normalize=algorithm.normalize_advantages,
        reads_teacher=algorithm.adv_estimator == "opd",
        distill_weight=algorithm.distill_weight,
        turn_discount=algorithm.turn_discount if algorithm.turn_rewards == "return_to_go" else None,
    )
