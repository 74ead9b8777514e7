"""The scorer protocol, through which the sampler gets rewards."""

from __future__ import annotations

from typing import Protocol

from gspo.types import Group, Reward

Graded = Reward | str
"""The outcome for one response: its reward, or the text of the failure that left it without one."""


class RewardError(ValueError):
    """A reward that cannot be set up or computed. The message names the function, the row and a remedy."""


class Scorer(Protocol):
    """Scores groups in the background. A reward that cannot be computed is missing (None), never 0."""

    def submit(self, group: Group) -> None:
        """Start scoring a group; returns at once."""
        ...

    def collect(self, num: int | None = None) -> list[Group]:
        """Wait for the first `num` groups that were submitted and not collected (None: all of them).

        Returns them with rewards, in the order of their submission.
        """
        ...

    def close(self) -> None:
        """End all workers and drop groups that were not collected."""
        ...
