"""Calls to trainer ranks that are Ray actors, and how failures of one or all of them come back."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from gspo.cluster import RayRanks, ResourcePool
from gspo.distributed.rank_group import RankFailed
from tests.distributed.ray.waiting import is_gone, wait_until
from tests.distributed.ray.workers import SumRank


@pytest.fixture
def pool(cluster):
    pool = ResourcePool([2], use_gpu=False, name_prefix="ranks")
    yield pool
    pool.release()


@pytest.fixture
def ranks(pool):
    ranks = RayRanks(pool, SumRank)
    yield ranks
    ranks.close()


def test_a_call_runs_on_every_rank_until_one_of_them_ends(ranks, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        dozing = pool.submit(ranks.call, SumRank.doze, str(tmp_path))
        assert wait_until(lambda: ranks.stacks().count("in doze") == 2), "ranks that hang say where"
        (tmp_path / "awake").touch()
        dozing.result(60)
    assert ranks.call(SumRank.where) == [(0, 2, 0, "cpu"), (1, 2, 1, "cpu")]
    assert ranks.call(SumRank.total, 5) == [15, 15]
    pids = ranks.call(SumRank.pid)
    assert len(set(pids)) == 2 and os.getpid() not in pids
    with pytest.raises(RankFailed, match=r"^trainer rank 0 of 2 died"):
        ranks.call(SumRank.vanish, 0)
    assert wait_until(lambda: all(is_gone(pid) for pid in pids))


@pytest.mark.slow
def test_an_error_of_all_ranks_is_raised_as_itself(ranks):
    with pytest.raises(LookupError, match="no such model") as caught:
        ranks.call(SumRank.refuse, None)
    assert "refuse" in caught.value.__notes__[0]  # where it was raised, with the remote traceback


@pytest.mark.slow
def test_one_rank_s_error_names_the_rank_first(pool, monkeypatch):
    monkeypatch.setattr("gspo.distributed.ray.ranks.CAUSE_SECONDS", 0.5)
    ranks = RayRanks(pool, SumRank)
    with pytest.raises(RankFailed, match=r"^trainer rank 1 of 2: LookupError: no such model"):
        ranks.call(SumRank.refuse, 1)
    with pytest.raises(RankFailed, match="have ended"):
        ranks.call(SumRank.where)


@pytest.mark.slow
def test_a_killed_rank_is_the_root_cause_whoever_notices_first(ranks):
    pids = ranks.call(SumRank.pid)
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"^trainer rank 1 of 2 died: .*pid: " + str(pids[1])):
        ranks.call(SumRank.total, 1)
