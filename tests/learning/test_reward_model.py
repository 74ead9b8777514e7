"""A reward model trained on pairs teaches the embedded model; one that can be hacked sets off the alarm; a teacher teaches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.config import load, load_supervised
from gspo.data.tasks.arithmetic import load_arithmetic
from gspo.loop.preferences import RewardModelTrainer
from gspo.loop.trainer import Trainer
from gspo.runs.console import Console

pytestmark = pytest.mark.slow
QUIET = ("trainer.num_threads=1", "trainer.save_freq=-1")


def train_scores(folder: Path, *words: str) -> dict[str, Any]:
    config = load_supervised(overrides=[f"trainer.default_local_dir={folder}", *QUIET, *words])
    return RewardModelTrainer(config, out=folder / "scores", console=Console(enabled=False)).fit()


def train(folder: Path, *words: str) -> tuple[dict[str, Any], Trainer]:
    config = load(overrides=[f"trainer.default_local_dir={folder}", "trainer.experiment_name=run", *QUIET, *words])
    trainer = Trainer(config, console=Console(enabled=False))
    return trainer.fit(), trainer


def test_a_reward_model_agrees_with_the_rule_and_teaches(tmp_path: Path) -> None:
    result = train_scores(tmp_path, "trainer.total_training_steps=100", "data.num_train_samples=4000")
    assert result["sign_accuracy"] >= 0.95  # of the held-out answers, right and wrong ones
    result, trainer = train(tmp_path, "reward_model.enable=true", f"reward_model.path={tmp_path / 'scores'}")
    assert result["final_acc"] >= 0.85  # by the rule, which training did not see
    rows = list(trainer.run.rows())
    assert {"reward/reward/model/mean", "reward/reward/arithmetic/mean", "reward_model/disagreement"} <= set(rows[-1])


def test_a_reward_model_that_can_be_hacked_sets_off_the_alarm(tmp_path: Path) -> None:
    """It likes nines: the policy learns to write them, and forgets how to add."""
    pairs = tmp_path / "pairs.jsonl"
    rows = [
        {"prompt": row.messages[0]["content"], "chosen": "9" * (2 + i % 4), "rejected": row.answer}
        for i, row in enumerate(load_arithmetic("train", limit=600))
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("trainer.total_training_steps=40", "data.train_batch_size=16", "actor_rollout_ref.actor.optim.lr=5e-4")
    train_scores(tmp_path, f"data.train_files={pairs}", *words)
    result, trainer = train(
        tmp_path,
        *("reward_model.enable=true", f"reward_model.path={tmp_path / 'scores'}"),
        *("actor_rollout_ref.actor.use_kl_loss=false", "actor_rollout_ref.actor.optim.lr=2e-4"),
        *("data.train_batch_size=16", "trainer.total_training_steps=16", "trainer.test_freq=4"),
    )
    assert result["final_acc"] < result["start_acc"]
    assert "reward_hacking" in {alarm.name for alarm in trainer.alarms.read()}


def test_a_teacher_teaches_the_embedded_model(tmp_path: Path) -> None:
    taught, trainer = train(tmp_path / "teacher", "trainer.save_freq=30")
    teacher = max(trainer.run.checkpoints.glob("step-*"))
    result, trainer = train(tmp_path / "pupil", "algorithm.adv_estimator=opd", f"actor_rollout_ref.ref.path={teacher}")
    assert taught["final_acc"] >= 0.85 and result["final_acc"] >= 0.85
    kl = [row["actor/teacher_kl"] for row in trainer.run.rows() if "actor/teacher_kl" in row]
    assert kl[-1] < kl[0] / 4
