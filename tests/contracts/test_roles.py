"""The Roles contract, run on each implementation."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from gspo.distributed.rank_group import RankPlace
from gspo.distributed.rank_roles import RankRoles
from gspo.distributed.rank_worker import RankModels
from gspo.distributed.torchrun_ranks import TorchrunRanks
from gspo.processes import free_port
from tests.contracts.roles import Make, RolesContract, local_roles


class TestLocalRoles(RolesContract):
    @pytest.fixture
    def make(self) -> Make:
        return partial(local_roles, False)


def rank_models(path: Path | None, device: torch.device) -> RankModels:
    return RankModels(local_roles(True, path))


class TestRankRoles(RolesContract):
    """Shards on a single rank in this process; tests/distributed runs several."""

    @pytest.fixture
    def make(self) -> Iterator[Make]:
        ranks = TorchrunRanks(RankPlace(0, 1, 0, "127.0.0.1", free_port(), "cpu"))
        yield lambda path: RankRoles(ranks, partial(rank_models, path))
        ranks.dismiss()
