"""Kept groups waiting for a training step, ordered by submission number."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable

from gspo.types import Group


class KeptQueue:
    """Gives out the lowest submission numbers first, and knows which of them nothing can come before.

    Groups below the `frontier` (the lowest submission not yet judged) are settled: their order is final.
    """

    def __init__(self) -> None:
        self._settled: deque[Group] = deque()
        self._waiting: list[tuple[int, Group]] = []

    def __len__(self) -> int:
        return len(self._settled) + len(self._waiting)

    @property
    def num_settled(self) -> int:
        """Groups at the head of the queue whose place is final."""
        return len(self._settled)

    def push(self, group: Group) -> None:
        """Add a kept group."""
        heapq.heappush(self._waiting, (group.submission, group))

    def settle(self, frontier: int) -> None:
        """Say that every submission below `frontier` has been judged."""
        while self._waiting and self._waiting[0][0] < frontier:
            self._settled.append(heapq.heappop(self._waiting)[1])

    def take(self, num_groups: int) -> list[Group]:
        """Remove and return the lowest `num_groups` (or all there are), in order."""
        taken = [self._settled.popleft() for _ in range(min(num_groups, len(self._settled)))]
        while len(taken) < num_groups and self._waiting:
            taken.append(heapq.heappop(self._waiting)[1])
        return taken

    def remove(self, condition: Callable[[Group], bool]) -> list[Group]:
        """Remove and return, in order, the groups for which `condition` holds."""
        removed = [group for group in self.groups() if condition(group)]
        if removed:
            self._settled = deque(g for g in self._settled if not condition(g))
            self._waiting = [(s, g) for s, g in self._waiting if not condition(g)]
            heapq.heapify(self._waiting)
        return removed

    def groups(self) -> list[Group]:
        """All groups in order, left where they are."""
        return [*self._settled, *(group for _, group in sorted(self._waiting, key=lambda item: item[0]))]
