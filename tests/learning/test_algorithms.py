"""Every algorithm lifts the embedded model's held-out accuracy; adaptive KL holds its target; staleness is survived."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.config import load
from gspo.loop import ending
from gspo.loop.trainer import Trainer
from gspo.runs.console import Console
from tests.support.small_run import config, even_first_byte, make_model

pytestmark = pytest.mark.slow

ACTOR, FILTER = "actor_rollout_ref.actor", "algorithm.filter_groups"
LOSS = f"{ACTOR}.policy_loss.loss_mode"
ALGORITHMS = {
    "ppo": (
        "critic.ppo_epochs=2",
        "algorithm.adv_estimator=gae",
        f"{LOSS}=vanilla",
        "critic.optim.lr=3e-4",
        "trainer.critic_warmup=3",
    ),
    "grpo": (f"{LOSS}=vanilla",),
    "gspo": (),
    "gspo_token": (f"{LOSS}=gspo_token",),
    "dapo": (f"{LOSS}=dapo",),
    "cispo": (f"{LOSS}=cispo",),
}


@pytest.fixture(autouse=True)
def without_report(monkeypatch):
    """The page that ends a run has tests of its own."""
    monkeypatch.setattr(ending, "write_report", lambda console, run: None)


def train_embedded(folder: Path, *overrides: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The result and the metric rows of a run of the embedded recipe without its KL term: the loss is alone."""
    run = [f"trainer.default_local_dir={folder}", "trainer.experiment_name=run", "trainer.save_groups=false"]
    alone = [f"{ACTOR}.use_kl_loss=false", f"{ACTOR}.optim.lr=1e-4"]
    result = Trainer(load(None, [*run, *alone, *overrides]), console=Console(enabled=False)).fit()
    return result, read(folder)


def read(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["step"] > 0]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_held_out_accuracy_rises_above_four_fifths(name, tmp_path):
    result, rows = train_embedded(tmp_path, "trainer.total_training_steps=30", *ALGORITHMS[name])
    assert result["start_acc"] < 0.5
    assert result["final_acc"] > 0.8
    if name == "ppo":
        explained = [row["critic/vf_explained_var"] for row in rows]
        assert explained[0] == pytest.approx(0, abs=1e-3)
        # It rises while answers still differ in kind, and falls when only slips are left to tell apart.
        assert max(sum(explained[i : i + 3]) / 3 for i in range(len(explained) - 2)) > 0.3


def test_adaptive_kl_holds_its_target_across_a_resume(tmp_path):
    model, target, steps = make_model(tmp_path / "model"), 0.2, 160
    overrides = (
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.save_groups=false",
        "data.train_batch_size=8",
        f"{ACTOR}.ppo_mini_batch_size=4",
        f"{ACTOR}.optim.lr=3e-3",
        f"{ACTOR}.clip_ratio_low=0.02",
        f"{ACTOR}.clip_ratio_high=0.02",
        f"{FILTER}.enable=false",
        "algorithm.adv_estimator=dr_grpo",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.kl_coef=0.1",
        f"algorithm.kl_ctrl.target_kl={target}",
        "algorithm.kl_ctrl.horizon=200",
    )
    for stop in (steps // 2, None):
        trainer = Trainer(
            config(tmp_path, model, *overrides), reward_fn=even_first_byte, console=Console(enabled=False)
        )
        step = trainer.train_step

        def stopping(trainer=trainer, step=step, stop=stop):
            step()
            if trainer.step == stop:
                trainer.stop.signal = 15

        trainer.train_step = stopping
        trainer.fit()
    rows = read(tmp_path)
    measured = [row["actor/reward_kl_penalty"] for row in rows]
    betas = [row["actor/reward_kl_penalty_coeff"] for row in rows]
    assert betas[steps // 2 - 1] > 0.2
    # β goes on from where it was, not from 0.1.
    assert abs(betas[steps // 2] / betas[steps // 2 - 1] - 1) < 0.05
    late = measured[-80:]
    assert abs(sum(late) / len(late) / target - 1) < 0.2


def test_decoupled_gspo_is_stable_at_staleness_four(tmp_path):
    """Beside it, on the same kind of stale groups, the plain token ratio against μ; both are reported."""
    stale = (f"{FILTER}.max_staleness=4", f"{FILTER}.max_in_flight=160")
    gspo, rows = train_embedded(
        tmp_path / "gspo", *stale, f"{ACTOR}.use_decoupled_loss=true", f"{ACTOR}.behav_imp_weight_cap=5.0"
    )
    plain, _ = train_embedded(tmp_path / "plain", *stale, f"{LOSS}=vanilla", f"{ACTOR}.old_log_prob_source=rollout")
    print(f"staleness 4: decoupled GSPO {gspo['final_acc']:.3f}, plain token ratio {plain['final_acc']:.3f}")
    assert max(row["train/staleness/max"] for row in rows) == 4
    assert max(row["actor/rollout_ratio_token/max"] for row in rows) > 1.5  # the answers are really old
    assert max(row["actor/seq_importance_ratio/max"] for row in rows) < 2
    assert sum(row["actor/skipped_updates"] for row in rows) == 0
    assert gspo["final_acc"] > 0.8
