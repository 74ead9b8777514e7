"""Asynchronous training learns what synchronous training learns, with rollouts up to two versions old."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from tests.faults import audit
from tests.learning.test_embedded import train
from tests.loop.runs import token_lags

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
    assert max(token_lags(tmp_path / "run")) <= 2
    assert audit.problems(tmp_path / "run") == []
    assert all(row["rollout/worker_restarts"] == 0 for row in rows if "rollout/worker_restarts" in row)


@pytest.mark.slow
def test_workers_in_step_train_the_embedded_model_as_one_process_does(tmp_path):
    short = ("trainer.total_training_steps=3", "trainer.val_before_train=false", "trainer.val_after_train=false")
    arms = {
        "one": ("algorithm.filter_groups.max_staleness=0",),
        "two": ("algorithm.filter_groups.max_staleness=0", f"{ROLLOUT}num_workers=2"),
        "async": (f"{ROLLOUT}mode=async", f"{ROLLOUT}max_head_offpolicyness=0"),
    }
    losses, weights = {}, {}
    for name, settings in arms.items():
        _, rows = train(tmp_path, *short, *settings, f"trainer.experiment_name={name}")
        losses[name] = [row["actor/pg_loss"] for row in rows]
        weights[name] = load_file(tmp_path / name / "checkpoints" / "step-000003" / "model.safetensors")
    for name in ("two", "async"):
        assert losses[name] == pytest.approx(losses["one"], abs=1e-6)
        for key, tensor in weights["one"].items():
            torch.testing.assert_close(weights[name][key], tensor, rtol=1e-5, atol=1e-6)
