"""The staleness budget: how many groups may be pending so that none becomes too old."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StalenessBudget:
    """Bounds the age, in weight versions, of the groups that are trained on.

    At most `(max_staleness + 1) * batch_size` groups are in flight or queued. All of them fit into the steps up to the
    last group's deadline, version + max_staleness. `must_wait` ensures the same for every older group: the oldest are
    taken first, and a step is delayed only while younger groups would take the last place of an older one. With full
    batches no group becomes stale.
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

    def must_wait(self, pending: Mapping[int, int], queued: Mapping[int, int], version: int) -> bool:
        """Whether taking the oldest batch now could make a group that is still generated or scored too old.

        `pending` and `queued` count groups by the version of their submission.
        """
        num_pending = num_queued = 0
        for group_version in sorted(pending.keys() | queued.keys()):
            steps_left = group_version + self.max_staleness - version
            if steps_left < 0:
                continue  # too old already
            num_pending += pending.get(group_version, 0)
            num_queued += queued.get(group_version, 0)
            num_left = num_pending + max(0, num_queued - self.batch_size)
            if num_pending and num_left > steps_left * self.batch_size:
                return True
        return False

    def is_stale(self, group_version: int, version: int) -> bool:
        """Whether a group submitted under `group_version` is too old to train on at `version`."""
        return version - group_version > self.max_staleness
