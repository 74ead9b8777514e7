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
def team(pool):
    team = RayRanks(pool, SumRank)
    yield team
    team.close()


def test_a_call_runs_on_every_rank_until_one_of_them_ends(team, tmp_path):
    with ThreadPoolExecutor(1) as pool:
        dozing = pool.submit(team.call, "doze", str(tmp_path))
        assert wait_until(lambda: team.stacks().count("in doze") == 2), "ranks that hang say where"
        (tmp_path / "awake").touch()
        dozing.result(60)
    assert team.call("where") == [(0, 2, 0, "cpu"), (1, 2, 1, "cpu")]
    assert team.call("total", 5) == [15, 15]
    pids = team.call("pid")
    assert len(set(pids)) == 2 and os.getpid() not in pids
    with pytest.raises(RankFailed, match=r"^trainer rank 0 of 2 died"):
        team.call("vanish", 0)
    assert wait_until(lambda: all(is_gone(pid) for pid in pids))


@pytest.mark.slow
def test_an_error_of_all_ranks_is_raised_as_itself(team):
    with pytest.raises(LookupError, match="no such model") as caught:
        team.call("refuse", None)
    assert "refuse" in caught.value.__notes__[0]  # where it was raised, with the remote traceback


@pytest.mark.slow
def test_one_rank_s_error_names_the_rank_first(pool, monkeypatch):
    monkeypatch.setattr("gspo.distributed.ray.ranks.CAUSE_SECONDS", 0.5)
    team = RayRanks(pool, SumRank)
    with pytest.raises(RankFailed, match=r"^trainer rank 1 of 2: LookupError: no such model"):
        team.call("refuse", 1)
    with pytest.raises(RankFailed, match="have ended"):
        team.call("where")


@pytest.mark.slow
def test_a_killed_rank_is_the_root_cause_whoever_notices_first(team):
    pids = team.call("pid")
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(RankFailed, match=r"^trainer rank 1 of 2 died: .*pid: " + str(pids[1])):
        team.call("total", 1)
