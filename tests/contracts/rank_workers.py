"""A rank that is small enough for tests of how calls travel and how they fail."""

from __future__ import annotations

import os
import time

import torch
import torch.distributed as dist

from gspo.distributed import torchrun_ranks
from gspo.distributed.rank_group import RankPlace
from gspo.distributed.rank_worker import RankWorker


class SumRank(RankWorker):
    """Adds numbers over all ranks with gloo, and fails on request."""

    def where(self) -> tuple[int, int, int, str]:
        assert self.place is not None
        return self.place.rank, self.place.world_size, self.place.local_rank, self.place.device

    def pid(self) -> int:
        return os.getpid()

    def total(self, x: int) -> int:
        assert self.place is not None
        value = torch.tensor([x * (self.place.rank + 1)])
        dist.all_reduce(value)
        return int(value)

    def refuse(self, rank: int | None = None) -> int:
        """All ranks, or one, raise; the others wait for it in a collective."""
        assert self.place is not None
        if rank in (None, self.place.rank):
            raise LookupError("no such model")
        return self.total(1)

    def doze(self, folder: str) -> None:
        """Do nothing until the test creates a file."""
        while not os.path.exists(os.path.join(folder, "awake")):
            time.sleep(0.05)


def follow(place: RankPlace) -> None:
    """Run a follower of TorchrunRanks in this process to its end."""
    torch.set_num_threads(1)
    torchrun_ranks.RankWorker = SumRank
    os._exit(torchrun_ranks.TorchrunRanks(place).follow())
