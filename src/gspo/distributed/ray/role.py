"""The roles of a run under verl's names, and which processes run them."""

from __future__ import annotations

from enum import Enum


class Role(Enum):
    """Trainer ranks run actor, critic and reference; rollout workers run Rollout."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    ActorRolloutRef = "actor_rollout_ref"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"

    def __str__(self) -> str:
        return f"Role.{self.name}"


# Any of these names the trainer ranks; the first in a mapping counts.
TRAINER_ROLES = (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor)
# These run inside the trainer ranks, beside the policy.
INNER_ROLES = (Role.Critic, Role.RefPolicy)
