"""The RankGroup contract, run on each implementation."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist

from gspo.distributed import torchrun_ranks
from gspo.distributed.rank_group import RankPlace
from gspo.distributed.torchrun_ranks import TorchrunRanks
from gspo.processes import free_port
from tests.contracts.rank_group import RankGroupContract
from tests.contracts.rank_workers import SumRank, follow
from tests.distributed.ray.local_ray import cluster

__all__ = ["cluster"]


class TestTorchrunRanks(RankGroupContract):
    """This process is rank 0; rank 1 is forked from a process that has loaded the libraries."""

    num_remote = 1

    @pytest.fixture
    def ranks(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[TorchrunRanks]:
        monkeypatch.setattr(torchrun_ranks, "RankWorker", SumRank)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.contracts.rank_workers"])
        first, second = (
            RankPlace(rank, 2, rank, "127.0.0.1", port, "cpu") for port in [free_port()] for rank in (0, 1)
        )
        follower = context.Process(target=follow, args=(second,), daemon=True)
        follower.start()
        ranks = TorchrunRanks(first)
        yield ranks
        ranks.dismiss()
        follower.join(30)
        assert follower.exitcode is not None, "the follower did not end"
        if dist.is_initialized():  # after a failure
            dist.destroy_process_group()


@pytest.mark.slow
class TestRayRanks(RankGroupContract):
    num_remote = 2

    @pytest.fixture
    def ranks(self, cluster: Any) -> Iterator[Any]:
        from gspo.cluster import RayRanks, ResourcePool

        pool = ResourcePool([2], use_gpu=False, name_prefix="ranks")
        ranks = RayRanks(pool, SumRank)
        yield ranks
        ranks.close()
        pool.release()
