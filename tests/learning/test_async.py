"""Asynchronous training learns what synchronous training learns, with rollouts up to two versions old."""

from __future__ import annotations

import pytest

from gspo.scorecard import audit

from .test_embedded import train

ROLLOUT = "actor_rollout_ref.rollout."


@pytest.mark.slow
def test_async_reaches_the_accuracy_of_sync_on_the_embedded_task(tmp_path):
    settings = (
        f"{ROLLOUT}mode=async",
        f"{ROLLOUT}max_head_offpolicyness=2",
        "actor_rollout_ref.actor.use_decoupled_loss=true",
        "trainer.experiment_name=run",
    )
    result, rows = train(tmp_path, *settings)
    assert result["start_acc"] <= 0.45
    assert result["final_acc"] >= 0.90, "what the synchronous recipe is held to"
    ages = audit.staleness(tmp_path / "run")
    assert max(ages) <= 2 and sum(ages) > 0, "rollouts ran ahead, and never too far"
    assert max(audit.token_lags(tmp_path / "run")) <= 2
    assert audit.problems(tmp_path / "run") == []
    assert all(row["rollout/worker_restarts"] == 0 for row in rows if "rollout/worker_restarts" in row)
