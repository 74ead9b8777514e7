"""What every RankGroup must do. A test class derives from RankGroupContract and gives it a fixture `ranks`."""

from __future__ import annotations

import os
import signal
import traceback
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gspo.distributed.rank_group import RankFailed, RankGroup
from tests.contracts.rank_workers import SumRank
from tests.distributed.ray.waiting import is_gone, wait_until


class RankGroupContract:
    """`ranks` is a group of two SumRanks, of which `num_remote` are in other processes."""

    num_remote: int

    def test_a_call_runs_on_every_rank_and_stacks_show_it(self, ranks: RankGroup, tmp_path: Path) -> None:
        assert ranks.world_size == 2
        assert ranks.call(SumRank.where) == [(0, 2, 0, "cpu"), (1, 2, 1, "cpu")]
        assert ranks.call(SumRank.total, 5) == [15, 15]
        assert len(set(ranks.call(SumRank.pid)) - {os.getpid()}) == self.num_remote
        with ThreadPoolExecutor(1) as pool:
            dozing = pool.submit(ranks.call, SumRank.doze, str(tmp_path))
            try:
                assert wait_until(lambda: ranks.stacks().count("in doze") == self.num_remote)
            finally:
                (tmp_path / "awake").touch()
            assert dozing.result(60) == [None, None]
        ranks.close()
        ranks.close()

    def test_an_error_of_all_ranks_is_raised_unchanged(self, ranks: RankGroup) -> None:
        with pytest.raises(LookupError, match=r"^no such model") as caught:
            ranks.call(SumRank.refuse, None)
        assert "in refuse" in "".join(traceback.format_exception(caught.value)), "it shows where it was raised"
        with pytest.raises(RankFailed, match="where: the trainer's ranks have ended"):
            ranks.call(SumRank.where)

    def test_an_error_of_one_rank_names_the_rank_and_the_cause(self, ranks: RankGroup) -> None:
        with pytest.raises(RankFailed, match=r"^trainer rank 1( of 2)?: LookupError: no such model"):
            ranks.call(SumRank.refuse, 1)
        with pytest.raises(RankFailed, match="have ended"):
            ranks.call(SumRank.where)

    def test_a_killed_rank_is_named_and_ends_the_group(self, ranks: RankGroup) -> None:
        pids = ranks.call(SumRank.pid)
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(RankFailed, match=rf"^trainer rank 1 (.|\n)*{pids[1]}"):
            ranks.call(SumRank.total, 1)
        ranks.close()
        assert wait_until(lambda: all(is_gone(pid) for pid in pids if pid != os.getpid()))
