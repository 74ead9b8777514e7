"""Groups that wait inside the sampler: kept ones for a training step, filtered ones in reserve."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

from gspo.types import Group

Filtered = tuple[Group, str]  # a group and why it was filtered


class KeptQueue:
    """Gives out the lowest submission numbers first, and counts what it holds by version."""

    def __init__(self) -> None:
        self.versions: Counter[int] = Counter()
        self._heap: list[tuple[int, Group]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, group: Group) -> None:
        """Add a kept group."""
        heapq.heappush(self._heap, (group.submission, group))
        self.versions[group.version] += 1

    def last_of(self, num_groups: int) -> int:
        """The highest submission number of the lowest `num_groups`."""
        return heapq.nsmallest(num_groups, self._heap)[-1][0]

    def take(self, num_groups: int) -> list[Group]:
        """Remove and return the lowest `num_groups` (or all there are), in order."""
        taken = [heapq.heappop(self._heap)[1] for _ in range(min(num_groups, len(self._heap)))]
        self.versions = self.versions - Counter(group.version for group in taken)
        return taken

    def remove(self, condition: Callable[[Group], bool]) -> list[Group]:
        """Remove and return, in order, the groups for which `condition` holds."""
        held = self.take(len(self._heap))
        for group in held:
            if not condition(group):
                self.push(group)
        return [group for group in held if condition(group)]

    def groups(self) -> list[Group]:
        """All groups in order, left where they are."""
        return [group for _, group in sorted(self._heap, key=lambda item: item[0])]


class Reserve:
    """Filtered groups that a step may have to train on after all (`on_limit: keep_unfiltered`).

    Holds about the earliest `size` groups of those added, so that memory does not grow with a long step.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: list[Filtered] = []

    def add(self, group: Group, reason: str) -> list[Filtered]:
        """Hold a group; returns those that are no longer of use."""
        self._held.append((group, reason))
        if len(self._held) < 2 * self._size:
            return []
        earliest = self.take(self._size)
        rest, self._held = self._held, earliest
        return rest

    def take(self, count: int) -> list[Filtered]:
        """Remove and return the `count` earliest by submission."""
        self._held.sort(key=lambda item: item[0].submission)
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def held(self) -> list[Filtered]:
        """All that are held, in the order in which they came."""
        return list(self._held)

    def clear(self) -> list[Filtered]:
        """Remove and return all."""
        held, self._held = self._held, []
        return held
