"""The settings of the trained models: how each divides and runs a batch."""

from __future__ import annotations

import dataclasses

from gspo.config import TrainerConfig
from gspo.seeding import derive_seed
from gspo.training.batch.batching import Kind
from gspo.training.critic import CriticSettings
from gspo.training.policy import PolicySettings

FLEX_ATTENTION = "flex_attention"  # of packed training; the engine and padded rows keep the model's own


def policy_settings(config: TrainerConfig) -> PolicySettings:
    """How the policy divides and runs a batch."""
    actor = config.actor_rollout_ref.actor
    by_tokens = actor.use_dynamic_bsz or actor.ppo_micro_batch_size_per_gpu is None
    score_tokens, score_rows = _score_cut(config)
    return PolicySettings(
        temperature=config.actor_rollout_ref.rollout.temperature,
        mini_batch_groups=actor.ppo_mini_batch_size,
        num_epochs=actor.ppo_epochs,
        micro_batch_tokens=actor.ppo_max_token_len_per_gpu if by_tokens else None,
        micro_batch_rows=actor.ppo_micro_batch_size_per_gpu or 1,
        old_log_prob_source=actor.old_log_prob_source,
        entropy_in_loss=actor.entropy_coeff != 0,
        entropy_checkpointing=actor.entropy_checkpointing,
        layout=layout_kind(config),
        flex_attention=config.actor_rollout_ref.model.attn_implementation == FLEX_ATTENTION,
        score_tokens=score_tokens,
        score_rows=score_rows,
    )


def _score_cut(config: TrainerConfig) -> tuple[int | None, int | None]:
    """Tokens or rows per micro-batch when π_old is computed; None where the config does not set them."""
    rollout, actor = config.actor_rollout_ref.rollout, config.actor_rollout_ref.actor
    rows, tokens = rollout.log_prob_micro_batch_size_per_gpu, rollout.log_prob_max_token_len_per_gpu
    by_tokens = rollout.log_prob_use_dynamic_bsz
    if by_tokens or (by_tokens is None and tokens is not None):
        return tokens or actor.ppo_max_token_len_per_gpu, None
    return None, rows


def layout_kind(config: TrainerConfig) -> Kind:
    """How micro-batches are laid out. Shared prompts are always packed, since their tokens belong to no single row."""
    c = config.actor_rollout_ref.model
    return "shared" if c.use_shared_prefix else "packed" if c.use_remove_padding else "plain"


def reference_settings(config: TrainerConfig, settings: PolicySettings) -> PolicySettings:
    """Micro-batches as the policy's, so that equal weights give equal bits, unless the config sets others."""
    c, actor = config.actor_rollout_ref.ref, config.actor_rollout_ref.actor
    rows, tokens = c.log_prob_micro_batch_size_per_gpu, c.log_prob_max_token_len_per_gpu
    by_tokens = c.log_prob_use_dynamic_bsz
    if by_tokens is None:
        by_tokens = rows is None and (tokens is not None or settings.micro_batch_tokens is not None)
    if by_tokens:
        budget = tokens or actor.ppo_max_token_len_per_gpu
        return dataclasses.replace(settings, micro_batch_tokens=budget)
    size = rows or settings.micro_batch_rows
    return dataclasses.replace(settings, micro_batch_tokens=None, micro_batch_rows=size)


def order_seed(config: TrainerConfig, step: int) -> int | None:
    """The seed that assigns groups to the mini-batches of a step, the critic's too; None keeps the order of sampling."""
    if not config.actor_rollout_ref.actor.shuffle:
        return None
    return derive_seed(config.trainer.seed, "mini_batches", step)


def critic_settings(config: TrainerConfig) -> CriticSettings:
    """How the critic divides and runs a batch: as the policy where its section has no value."""
    c, actor = config.critic, config.actor_rollout_ref.actor
    rows, tokens = c.ppo_micro_batch_size_per_gpu, c.ppo_max_token_len_per_gpu
    return CriticSettings(
        mini_batch_groups=c.ppo_mini_batch_size or actor.ppo_mini_batch_size,
        num_epochs=c.ppo_epochs or actor.ppo_epochs,
        micro_batch_tokens=None if rows else tokens or actor.ppo_max_token_len_per_gpu,
        micro_batch_rows=rows or 1,
        clip=c.cliprange_value,
        layout=layout_kind(config),
    )
