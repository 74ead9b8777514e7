"""The roles of a run, under verl's names, and who plays them here."""

from __future__ import annotations

from enum import Enum


class Role(Enum):
    """What a worker does. Actor, critic and reference are played by the trainer ranks; Rollout by rollout workers."""

    Actor = "actor"
    Rollout = "rollout"
    ActorRollout = "actor_rollout"
    ActorRolloutRef = "actor_rollout_ref"
    Critic = "critic"
    RefPolicy = "ref"
    RewardModel = "rm"

    def __str__(self) -> str:
        return f"Role.{self.name}"


# Any of these names the trainer ranks; the first one that is given counts.
TRAINER_ROLES = (Role.ActorRolloutRef, Role.ActorRollout, Role.Actor)
# Played inside the trainer ranks, next to the policy: they have no process of their own.
INNER_ROLES = (Role.Critic, Role.RefPolicy)
