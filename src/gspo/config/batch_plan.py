"""The batch plan: what one training step will do, counted from the config alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gspo.config.resolved_loss import resolved_loss
from gspo.config.schema import TrainerConfig


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Sizes of a step with every null filled in. Token counts are upper bounds."""

    prompts: int  # groups trained on in a step
    group_size: int
    generation_batch: int  # prompts generated at once
    mini_batch_prompts: int
    num_mini_batches: int
    num_epochs: int
    max_prompt_tokens: int
    max_response_tokens: int
    max_generation_batches: int | None  # a step may use; None = unlimited
    total_steps: int | None  # None: known only with the data

    @staticmethod
    def of(config: TrainerConfig) -> BatchPlan:
        """The plan of a checked config."""
        data, actor, rollout = config.data, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
        groups = config.algorithm.filter_groups
        limit = groups.max_num_gen_batches if groups.enable else 1
        return BatchPlan(
            prompts=data.train_batch_size,
            group_size=rollout.n,
            generation_batch=(data.gen_batch_size if groups.enable else None) or data.train_batch_size,
            mini_batch_prompts=actor.ppo_mini_batch_size,
            num_mini_batches=max(1, data.train_batch_size // actor.ppo_mini_batch_size),
            num_epochs=actor.ppo_epochs,
            max_prompt_tokens=rollout.prompt_length or data.max_prompt_length,
            max_response_tokens=rollout.response_length or data.max_response_length,
            max_generation_batches=limit if limit > 0 else None,
            total_steps=_total_steps(config),
        )

    @property
    def rollouts(self) -> int:
        """Responses trained on in a step."""
        return self.prompts * self.group_size

    @property
    def mini_batch_rollouts(self) -> int:
        return self.mini_batch_prompts * self.group_size

    @property
    def optimiser_steps(self) -> int:
        """Updates of the weights in a training step."""
        return self.num_mini_batches * self.num_epochs

    @property
    def max_tokens(self) -> int:
        """Prompt and response tokens of a step's responses, at most."""
        return self.rollouts * (self.max_prompt_tokens + self.max_response_tokens)

    @property
    def max_trained_tokens(self) -> int:
        """Response tokens of a step, at most."""
        return self.rollouts * self.max_response_tokens

    @property
    def max_generated_tokens(self) -> int | None:
        """Response tokens generated for a step, at most; None when dynamic sampling has no limit."""
        if self.max_generation_batches is None:
            return None
        return (
            self.max_generation_batches * self.generation_batch * self.group_size * self.max_response_tokens
        )

    def lines(self) -> list[tuple[str, str]]:
        """The plan as (what, how much) pairs."""
        total = "depends on the data" if self.total_steps is None else f"{self.total_steps:,}"
        batches = "unlimited" if self.max_generation_batches is None else str(self.max_generation_batches)
        generated = self.max_generated_tokens
        updates = f"{self.optimiser_steps} ({self.num_mini_batches} mini-batches x {self.num_epochs} epochs)"
        return [
            ("training steps", total),
            ("prompts per step", f"{self.prompts:,}"),
            ("rollouts per step", f"{self.rollouts:,} ({self.prompts:,} groups of {self.group_size})"),
            ("generation batch", f"{self.generation_batch:,} prompts, at most {batches} per step"),
            ("mini-batch", f"{self.mini_batch_prompts:,} prompts, {self.mini_batch_rollouts:,} rollouts"),
            ("optimiser steps per step", updates),
            ("tokens per rollout", f"up to {self.max_prompt_tokens:,} + {self.max_response_tokens:,}"),
            ("trained tokens per step", f"up to {self.max_trained_tokens:,}"),
            ("generated tokens per step", "unlimited" if generated is None else f"up to {generated:,}"),
        ]


def _total_steps(config: TrainerConfig) -> int | None:
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    samples = config.data.num_train_samples
    return None if samples is None else samples // config.data.train_batch_size * config.trainer.total_epochs


def roles(config: TrainerConfig) -> dict[str, bool]:
    """Which models beside the policy the config asks for."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    needs_critic = algorithm.adv_estimator == "gae"
    return {
        "reference": actor.use_kl_loss or algorithm.use_kl_in_reward,
        "critic": needs_critic if config.critic.enable is None else config.critic.enable,
    }


def without_effect(config: TrainerConfig, ineffective: Sequence[str] = ()) -> list[str]:
    """What cannot have an effect in this run, in sentences."""
    plan, actor = BatchPlan.of(config), config.actor_rollout_ref.actor
    objective = resolved_loss(actor)
    found = list(ineffective)
    if plan.optimiser_steps == 1 and actor.old_log_prob_source != "rollout":
        found.append("clipping: with one optimiser step per rollout batch the ratio is always 1")
    elif objective.clips and actor.old_log_prob_source != "rollout":
        found.append("clipping in the first mini-batch of a step: its ratio is 1 by construction")
    if not config.algorithm.filter_groups.enable and plan.group_size > 1:
        found.append(
            "groups with equal rewards: they are trained on but give no gradient (filter_groups.enable is off)"
        )
    for role, wanted in roles(config).items():
        if not wanted:
            found.append(f"{role}: this config does not use one")
    return found
