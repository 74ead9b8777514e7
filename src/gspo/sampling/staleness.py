"""The staleness budget: how many groups may be under way so that none grows too old."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessBudget:
    """Bounds the age, in weight versions, of what is trained on.

    At most `(max_staleness + 1) * batch_size` groups are in flight or queued. Taken in order of submission, a group
    then has fewer than that many before it, and so is trained on within `max_staleness` versions of its own.
    """

    batch_size: int
    max_staleness: int

    @property
    def capacity(self) -> int:
        """Groups that may be in flight or queued at once."""
        return (self.max_staleness + 1) * self.batch_size

    def room(self, num_outstanding: int) -> int:
        """How many more groups may be submitted."""
        return max(0, self.capacity - num_outstanding)

    def is_stale(self, group_version: int, version: int) -> bool:
        """Whether a group submitted under `group_version` is too old to train on at `version`."""
        return version - group_version > self.max_staleness
