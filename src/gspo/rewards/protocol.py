"""How groups get their rewards: the scorer protocol between the sampler and whatever computes rewards."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from gspo.types import Group, Reward

Graded = Reward | str
"""The outcome for one response: its reward, or the text of the failure that left it without one."""


class RewardError(ValueError):
    """A reward that cannot be set up or computed. The message names the function, the row and the remedy."""


class TooManyFailures(RuntimeError):
    """More rewards failed than the run tolerates. The message carries the first failure in full."""


class Scorer(Protocol):
    """Scores groups in the background. A reward that could not be computed is missing (None), never 0."""

    def submit(self, group: Group) -> None:
        """Start scoring a group; returns at once."""
        ...

    def collect(self) -> list[Group]:
        """Wait for every group submitted so far and return them, scored, in order of submission to the scorer."""
        ...

    def close(self) -> None: ...


def check_failures(groups: Iterable[Group], limit: float = 0.2) -> int:
    """Count the responses without a reward; raise TooManyFailures with the first when their share exceeds `limit`."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failures = [rollout.failure or "no reward was computed" for rollout in rollouts if rollout.reward is None]
    if len(failures) > limit * len(rollouts):
        raise TooManyFailures(
            f"{len(failures)} of {len(rollouts)} rewards failed (reward.max_failure_rate allows a share of {limit:g}). "
            f"Nothing was trained on them. The first failure:\n{failures[0]}"
        )
    return len(failures)
