"""Environments with rollout workers: in step with the trainer as in one process, and beside it within the bound."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.loop import ending
from gspo.runs.group_log import read_groups
from tests.loop.episode_run import OVERRIDES
from tests.loop.runs import rows, token_lags, train
from tests.loop.test_async import ASYNC, IN_STEP, assert_same_run
from tests.loop.workers import use_threads
from tests.support.small_run import make_model

TURNS = (*OVERRIDES[:-1], "environment.num_workers=1", "actor_rollout_ref.rollout.max_num_seqs=64")
ON_POLICY = "algorithm.filter_groups.max_staleness=0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), initializer_range=0.4)


@pytest.fixture(autouse=True)
def in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    use_threads(monkeypatch)
    monkeypatch.setattr(ending, "write_report", lambda console, run: None)


def num_turns(folder: Path) -> int:
    """The most turns of a rollout."""
    files = sorted((folder / "run" / "groups").glob("*.gz"))
    return max(len(response["turns"]) for file in files for g in read_groups(file) for response in g["responses"])


def test_workers_in_step_train_what_one_process_trains(model: Path, tmp_path: Path) -> None:
    train(tmp_path / "one", model, ON_POLICY, *TURNS)
    train(tmp_path / "workers", model, *TURNS, *IN_STEP, "actor_rollout_ref.rollout.num_workers=2")
    assert_same_run(tmp_path / "one", tmp_path / "workers")
    assert num_turns(tmp_path / "workers") > 1


def test_asynchronous_rollouts_with_turns_keep_the_bound(model: Path, tmp_path: Path) -> None:
    train(tmp_path, model, *TURNS, *ASYNC)
    assert len(rows(tmp_path)) == 4 and num_turns(tmp_path) > 1
    assert max(token_lags(tmp_path / "run")) <= 2
    assert all(row["num_turns/mean"] >= 1 for row in rows(tmp_path))
    failures = [row["environment/failures"] for row in rows(tmp_path) if "environment/failures" in row]
    assert failures and not any(failures)  # a step that trains on earlier groups may have judged none
