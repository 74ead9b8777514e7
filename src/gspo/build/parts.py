"""The objects of one run, and the calls that concern all of them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, cast

from gspo.algo.objective import Objective
from gspo.build.fingerprint import check_fingerprint
from gspo.config import TrainerConfig, resolved_loss
from gspo.data.examples import Example, ExampleOrder
from gspo.distributed.run_layout import runs_ahead
from gspo.evaluation.evaluator import Evaluator
from gspo.evaluation.greedy_baseline import GreedyBaseline
from gspo.rewards import Scorer
from gspo.rewards.judge.own_server import OwnServer
from gspo.rewards.mixed import MixedScorer
from gspo.rollout.engine import RolloutEngine
from gspo.sampling.sampler import Sampler
from gspo.training.kl_reward import KlScorer
from gspo.training.policy import Policy
from gspo.training.roles import LocalRoles, PolicyFacts, Roles


class Parts(Protocol):
    """What every run needs of its objects: the models and their tokenizer, its length, its state, and their end."""

    tokenizer: Any
    roles: Roles
    total_steps: int
    fingerprint: dict[str, Any]

    def publish(self, version: int) -> None:
        """Let the engine use the policy's current weights."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state at a step boundary besides tensors."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def check_fingerprint(self, saved: Mapping[str, Any]) -> list[str]:
        """Refuse to resume when the model, the data or the machine's arithmetic differs. Returns notes for the user."""
        ...

    def summary(self, path: Path, total_steps: int) -> str:
        """A few lines about the run that is about to start."""
        ...

    def stacks(self) -> str:
        """The stacks of the run's other processes."""
        ...

    def kill(self) -> None:
        """End the run's other processes at once."""
        ...

    def close(self) -> None:
        """Close every part, whatever one of them raises."""
        ...


@dataclass
class RunParts:
    """The objects of one run, and what identifies its computation."""

    config: TrainerConfig
    tokenizer: Any
    roles: Roles
    engine: RolloutEngine
    sampler: Sampler
    evaluator: Evaluator | None
    objective: Objective
    total_steps: int
    fingerprint: dict[str, Any]
    scorers: list[Scorer] = field(default_factory=list)
    data: str = ""  # what is trained on, in words
    kl_reward: KlScorer | None = None
    examples: ExampleOrder[Example] | None = None  # imitated beside reinforcement learning
    mixed: MixedScorer | None = None  # with a judge or a reward model
    judge: OwnServer | None = None  # the start model, served as the judge
    baseline: GreedyBaseline | None = None
    # Keys that nobody set and that had to change, with value and reason.
    adapted: dict[str, tuple[Any, str]] = field(default_factory=dict)
    held_out: dict[str, int] = field(default_factory=dict)  # how many questions, and how many of them are training rows
    notes: list[str] = field(default_factory=list)  # for the user, about the data

    def __post_init__(self) -> None:
        self.token_text = functools.cache(lambda token: self.tokenizer.decode([token], skip_special_tokens=False))

    @property
    def policy(self) -> Policy:
        """The policy in this process. One on other ranks is reached through `roles`."""
        assert isinstance(self.roles, LocalRoles)
        return cast(LocalRoles, self.roles).policy

    def publish(self, version: int) -> None:
        self.engine.load_weights(None, version=version)

    def state_dict(self) -> dict[str, Any]:
        """The state at a step boundary besides tensors. The sampler comes first: it collects rewards, which updates KL."""
        state = {"sampler": self.sampler.state_dict(), "objective": self.objective.state_dict()}
        if self.mixed is not None:
            state["rewards"] = self.mixed.state_dict()
        return state if self.kl_reward is None else {**state, "kl_reward": self.kl_reward.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.objective.load_state_dict(state["objective"])
        if self.mixed is not None:
            self.mixed.load_state_dict(state.get("rewards", {}))
        if self.kl_reward is not None and "kl_reward" in state:  # a branch may be the first to have one
            self.kl_reward.load_state_dict(state["kl_reward"])
        self.sampler.load_state_dict(state["sampler"])

    def check_fingerprint(self, saved: Mapping[str, Any]) -> list[str]:
        """Refuse to resume when the model, the data or the machine's arithmetic differs. Returns notes for the user."""
        return check_fingerprint(saved, self.fingerprint)

    def summary(self, path: Path, total_steps: int) -> str:
        """A few lines about the run that is about to start."""
        c = self.config
        actor = c.actor_rollout_ref.actor
        facts = self.roles.facts()
        updates = -(-c.data.train_batch_size // actor.ppo_mini_batch_size) * actor.ppo_epochs
        return (
            f"{c.actor_rollout_ref.model.path} ({model_size(facts)}) on {self.data}, "
            f"{resolved_loss(actor)}, {c.algorithm.adv_estimator} advantages, {where(facts)}\n"
            f"{total_steps} step{'s' * (total_steps != 1)} of {c.data.train_batch_size} groups × {c.actor_rollout_ref.rollout.n} responses, "
            f"{updates} optimiser steps each; files in {path}"
            + "".join(f"\n{note}" for note in self.notes)
            + f"{self._rollouts()}{layout_note(facts)}"
        )

    def _rollouts(self) -> str:
        """A line about the rollout workers; "" without any."""
        count, bound = self.engine.num_workers, self.config.actor_rollout_ref.rollout.max_head_offpolicyness
        if not count:
            return ""
        how = f"at most {bound} versions ahead of training" if runs_ahead(self.config) else "in lockstep"
        return f"\nrollouts in {count} worker process{'es' * (count > 1)}, {how}"

    def stacks(self) -> str:
        """The stacks of the run's other processes: trainer ranks, then rollout workers."""
        return "\n".join(filter(None, [self.roles.stacks(), self.engine.stacks()]))

    def kill(self) -> None:
        """End the run's other processes at once."""
        self.engine.kill()

    def close(self) -> None:
        """Close every part, whatever one of them raises; the engine first, because the sampler's thread may wait for it."""
        with ExitStack() as stack:
            stack.callback(self.roles.close)
            if self.judge is not None:
                stack.callback(self.judge.close)
            for scorer in self.scorers:
                stack.callback(scorer.close)
            stack.callback(self.sampler.close)
            stack.callback(self.engine.close)


def model_size(facts: PolicyFacts) -> str:
    """How many parameters the policy has, and how many of them are trained."""
    trained, num = facts.num_trained, facts.num_parameters
    return f"{num:,} parameters" if trained == num else f"{trained:,} of {num:,} parameters trained"


def where(facts: PolicyFacts) -> str:
    """The device of the policy, or its ranks."""
    if facts.num_ranks is None:
        return facts.device
    shared = f", {facts.ranks_per_sequence} per sequence" if facts.ranks_per_sequence > 1 else ""
    return f"{facts.num_ranks} rank{'s' * (facts.num_ranks > 1)} on {facts.device}{shared}"


def layout_note(facts: PolicyFacts) -> str:
    """A line that says why training does not share prompts or pack, where the config asks for it; "" otherwise."""
    return f"\ntraining in padded rows: {facts.layout_problem}" if facts.layout_problem else ""
