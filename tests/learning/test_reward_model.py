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
from gspo.runs.group_log import read_groups

pytestmark = pytest.mark.slow
QUIET = ("trainer.num_threads=1", "trainer.save_freq=-1")


def train_scores(folder: Path, *words: str) -> dict[str, Any]:
    config = load_supervised(overrides=[f"trainer.default_local_dir={folder}", *QUIET, *words])
    return RewardModelTrainer(config, out=folder / "scores", console=Console(enabled=False)).fit()


def train(folder: Path, *words: str) -> tuple[dict[str, Any], Trainer]:
    config = load(overrides=[f"trainer.default_local_dir={folder}", "trainer.experiment_name=run", *QUIET, *words])
    trainer = Trainer(config, console=Console(enabled=False))
    return trainer.fit(), trainer


@pytest.fixture(scope="module")
def by_rule(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """The embedded model after the 30 steps of its recipe."""
    result, trainer = train(tmp_path_factory.mktemp("rule"), "trainer.save_freq=30")
    assert result["final_acc"] >= 0.85
    return trainer


def agreement(trainer: Trainer, step: int) -> float:
    """The share of the held-out answers of a step on whose side of 0 the reward model is where the rule puts them."""
    records = list(read_groups(trainer.run.evals / f"step-{step:06d}.jsonl.gz"))
    answers = [response for record in records for response in record["responses"]]
    return sum((r["extra"]["reward/model"] > 0) == (r["acc"] > 0.5) for r in answers) / len(answers)


def test_a_reward_model_teaches_and_agrees_with_the_rule_on_what_it_taught(tmp_path: Path) -> None:
    """After so few steps it sees whether a sum is worked out and not whether it is right; working out is what helps."""
    words = ("data.num_train_samples=6000", "data.num_val_samples=100", "data.train_batch_size=32")
    train_scores(tmp_path, "trainer.total_training_steps=200", *words)
    result, trainer = train(tmp_path, "reward_model.enable=true", f"reward_model.path={tmp_path / 'scores'}")
    assert result["final_acc"] >= 0.85  # by the rule, which training did not see
    assert agreement(trainer, 30) >= 0.95
    rows = list(trainer.run.rows())
    assert {"reward/reward/model/mean", "reward/reward/arithmetic/mean", "reward_model/disagreement"} <= set(rows[-1])


def test_a_reward_model_that_can_be_hacked_sets_off_the_alarm(tmp_path: Path) -> None:
    """It likes a 9 at the end: the policy learns to write one, and forgets how to add."""
    pairs = tmp_path / "pairs.jsonl"
    rows = [
        {
            "prompt": row.messages[0]["content"],
            "chosen": f"{int(row.ground_truth) // 10}9",
            "rejected": f"{int(row.ground_truth) // 10}{i % 9}",
        }
        for i, row in enumerate(load_arithmetic("train", limit=600))
    ]
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("trainer.total_training_steps=40", "data.train_batch_size=16", "actor_rollout_ref.actor.optim.lr=5e-4")
    train_scores(tmp_path, f"data.train_files={pairs}", *words)
    result, trainer = train(
        tmp_path,
        *("reward_model.enable=true", f"reward_model.path={tmp_path / 'scores'}"),
        *("actor_rollout_ref.actor.use_kl_loss=false", "actor_rollout_ref.actor.optim.lr=2e-4"),
        *(
            "data.train_batch_size=16",
            "data.num_val_samples=128",
            "trainer.total_training_steps=16",
            "trainer.test_freq=4",
        ),
    )
    assert result["final_acc"] < result["start_acc"]
    assert "reward_hacking" in {alarm.name for alarm in trainer.alarms.read()}


def test_a_teacher_teaches_the_embedded_model(tmp_path: Path, by_rule: Trainer) -> None:
    teacher = max(by_rule.run.checkpoints.glob("step-*"))
    result, trainer = train(tmp_path / "pupil", "algorithm.adv_estimator=opd", f"actor_rollout_ref.ref.path={teacher}")
    assert result["final_acc"] >= 0.85
    kl = [row["actor/teacher_kl"] for row in trainer.run.rows() if "actor/teacher_kl" in row]
    assert kl[-1] < kl[0] / 4
