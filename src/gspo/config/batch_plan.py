"""The batch plan: the sizes of one training step, computed from the config alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gspo.config.resolved_loss import resolved_loss
from gspo.config.reward_parts import reward_parts
from gspo.config.schema import TrainerConfig


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Sizes of a step, with every null filled in. Token counts are upper bounds."""

    prompts: int  # groups per step
    group_size: int
    generation_batch: int  # prompts per generation batch
    mini_batch_prompts: int
    num_mini_batches: int
    num_epochs: int
    max_prompt_tokens: int
    max_response_tokens: int
    max_generation_batches: int | None  # per step; None: no limit
    total_steps: int | None  # None: depends on the data

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
        """Responses per step."""
        return self.prompts * self.group_size

    @property
    def mini_batch_rollouts(self) -> int:
        return self.mini_batch_prompts * self.group_size

    @property
    def optimiser_steps(self) -> int:
        """Weight updates per training step."""
        return self.num_mini_batches * self.num_epochs

    @property
    def max_tokens(self) -> int:
        """Upper bound of the prompt and response tokens per step."""
        return self.rollouts * (self.max_prompt_tokens + self.max_response_tokens)

    @property
    def max_trained_tokens(self) -> int:
        """Upper bound of the response tokens per step."""
        return self.rollouts * self.max_response_tokens

    @property
    def max_generated_tokens(self) -> int | None:
        """Upper bound of the tokens generated per step; None when dynamic sampling has no limit."""
        if self.max_generation_batches is None:
            return None
        return self.max_generation_batches * self.generation_batch * self.group_size * self.max_response_tokens

    def lines(self) -> list[tuple[str, str]]:
        """The plan as (what, how much) pairs."""
        total = "depends on the data" if self.total_steps is None else f"{self.total_steps:,}"
        most, generated = self.max_generation_batches, self.max_generated_tokens
        batches = "any number of batches" if most is None else f"at most {_count(most, 'batch')}"
        groups = f"{_count(self.prompts, 'group')} of {self.group_size}"
        updates = f"{_count(self.num_mini_batches, 'mini-batch')} x {_count(self.num_epochs, 'epoch')}"
        mini = f"{_count(self.mini_batch_prompts, 'prompt')}, {_count(self.mini_batch_rollouts, 'rollout')}"
        lengths = f"{self.max_prompt_tokens:,} (prompt) + {self.max_response_tokens:,} (response)"
        return [
            ("training steps", total),
            ("prompts per step", f"{self.prompts:,}"),
            ("rollouts per step", f"{self.rollouts:,} ({groups})"),
            ("generation batch", f"{_count(self.generation_batch, 'prompt')}, {batches} per step"),
            ("mini-batch", mini),
            ("optimiser steps per step", f"{self.optimiser_steps} ({updates})"),
            ("tokens per rollout", f"up to {lengths}"),
            ("trained tokens per step", f"up to {self.max_trained_tokens:,}"),
            ("generated tokens per step", "no limit" if generated is None else f"up to {generated:,}"),
        ]


def _count(number: int, noun: str) -> str:
    """`1 prompt`, `32 prompts`, `2 batches`, `2 epochs`."""
    plural = f"{noun}es" if noun.endswith("tch") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def _total_steps(config: TrainerConfig) -> int | None:
    if config.trainer.total_training_steps is not None:
        return config.trainer.total_training_steps
    samples = config.data.num_train_samples
    return None if samples is None else samples // config.data.train_batch_size * config.trainer.total_epochs


def trains_on_ranks(config: TrainerConfig) -> bool:
    """Whether the models are sharded over trainer ranks. On Ray they always are."""
    return config.actor_rollout_ref.actor.strategy == "fsdp2" or config.trainer.backend == "ray"


def roles(config: TrainerConfig) -> dict[str, bool]:
    """Which models the config needs besides the policy."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    needs_critic = algorithm.adv_estimator == "gae"
    return {
        "reference": actor.use_kl_loss or algorithm.use_kl_in_reward or distills(config),
        "critic": needs_critic if config.critic.enable is None else config.critic.enable,
        "reward model": reward_parts(config).model is not None,
    }


def distills(config: TrainerConfig) -> bool:
    """Whether a teacher, the reference, has a part in the advantages."""
    return config.algorithm.adv_estimator == "opd" or config.algorithm.distill_weight > 0


def without_effect(config: TrainerConfig, ineffective: Sequence[str] = ()) -> list[str]:
    """Settings and parts that have no effect in this run, as sentences. `ineffective` are those of single keys."""
    plan, actor = BatchPlan.of(config), config.actor_rollout_ref.actor
    objective = resolved_loss(actor)
    found = list(ineffective)
    if plan.optimiser_steps == 1 and actor.old_log_prob_source != "rollout":
        found.append("clipping: with one optimiser step per rollout batch the ratio is always 1")
    elif objective.clips and actor.old_log_prob_source != "rollout":
        found.append("clipping in the first mini-batch of a step: the weights have not changed yet, so its ratio is 1")
    if not config.algorithm.filter_groups.enable and plan.group_size > 1:
        found.append(
            "groups with equal rewards: they are trained on but give no gradient (filter_groups.enable is off)"
        )
    for role, wanted in roles(config).items():
        if not wanted:
            found.append(f"keys of the {role}: this config uses no {role}")
    return found
