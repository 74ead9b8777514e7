"""Rollouts from the trainer ranks: each generates its share of the groups with a full copy of the weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gspo.distributed.rank_group import RankGroup
from gspo.distributed.rank_worker import RankWorker
from gspo.rollout.engine import GroupRequest, RolloutEngine
from gspo.types import Group


class RankEngine(RolloutEngine):
    """A RolloutEngine over the ranks of a group, stepped together.

    Group number i goes to rank i modulo world_size. Which groups share a rank depends on the submissions alone, so a
    resumed run with the same number of ranks computes the same bits.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._new: list[GroupRequest] = []  # queued, not yet sent
        self._num_sent = 0

    @property
    def num_in_flight(self) -> int:
        return self._num_sent + len(self._new)

    def submit(self, request: GroupRequest) -> None:
        self._new.append(request)

    def step(self) -> list[Group]:
        if not self.num_in_flight:
            return []
        requests, self._new = self._new, []
        self._num_sent += len(requests)
        done = [group for groups in self._ranks.call(RankWorker.engine_advance, requests) for group in groups]
        self._num_sent -= len(done)
        return sorted(done, key=lambda group: group.submission)

    def generate(self, requests: Sequence[GroupRequest]) -> list[Group]:
        if not requests:
            return []
        by_rank = [iter(groups) for groups in self._ranks.call(RankWorker.engine_generate, list(requests))]
        return [next(by_rank[i % self._ranks.world_size]) for i in range(len(requests))]

    def load_weights(self, weights: Any, version: int) -> None:
        """Copy the policy's weights to the engine of every rank. The ranks hold them, so `weights` is None."""
        assert weights is None, "the ranks hold the weights"
        self._ranks.call(RankWorker.engine_publish, version)

    def unfinished(self) -> list[GroupRequest]:
        sent = [request for requests in self._ranks.call(RankWorker.engine_unfinished) for request in requests]
        return sorted([*sent, *self._new], key=lambda request: request.submission)

    def clear(self) -> None:
        self._new, self._num_sent = [], 0
        self._ranks.call(RankWorker.engine_clear)

    def close(self) -> None:
        """Nothing to do: the ranks close their engines."""
