"""The flagship run: the embedded model gets better because of the reward, and not without it."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from gspo.config import load
from gspo.data.tasks.splits import NUM_HELD_OUT
from gspo.loop.trainer import Trainer
from gspo.rewards import Reward
from gspo.runs.console import Console
from gspo.seeding import derive_seed


def train(folder, *overrides, reward=None, patch=None):
    config = load(
        None, [f"trainer.default_local_dir={folder}", "trainer.save_freq=-1", "trainer.num_threads=1", *overrides]
    )
    trainer = Trainer(config, reward_fn=reward, console=Console(enabled=False))
    if patch is not None:
        patch(trainer)
    result = trainer.fit()
    rows = [json.loads(line) for line in (trainer.run.metrics_file).read_text().splitlines()]
    return result, rows


def test_ten_steps_teach_the_embedded_model_to_work_it_out(tmp_path):
    result, rows = train(
        tmp_path,
        "trainer.total_training_steps=10",
        "actor_rollout_ref.actor.optim.total_training_steps=30",
        "data.num_val_samples=256",
    )
    assert result["start_acc"] <= 0.45
    assert result["final_acc"] >= 0.55
    lengths = [rows[i]["val-aux/arithmetic/response_length/mean"] for i in (0, -1)]
    assert lengths[1] > 2 * lengths[0]  # it learnt to think before it answers
    assert rows[1]["actor/seq_importance_ratio/mb0"] == 1.0
    assert 0.05 <= sum(r["actor/pg_clipfrac_later"] for r in rows[1:]) / 10 <= 0.45


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_whole_recipe_reaches_its_accuracy(tmp_path, seed):
    result, rows = train(tmp_path, f"trainer.seed={seed}")
    assert result["start_acc"] <= 0.45 and result["final_acc"] >= 0.90
    later = [r["actor/pg_clipfrac_later"] for r in rows if "actor/pg_clipfrac_later" in r]
    assert 0.05 <= sum(later) / len(later) <= 0.35


def coin(prompt, response: str) -> Reward:
    """A reward that knows nothing of the answer; the accuracy it reports is the real one."""
    heads = derive_seed(0, f"coin/{prompt.uid}/{response}", response.index) % 2
    right = response.rsplit(";", 1)[-1].strip() == str(prompt.ground_truth)
    return Reward(score=float(heads), acc=float(right))


def within_noise(result, num_questions: int = NUM_HELD_OUT) -> bool:
    """Whether start and end differ by no more than two evaluations of one model on fresh questions would (95 %)."""
    share = (result["start_acc"] + result["final_acc"]) / 2
    noise = 1.96 * math.sqrt(2 * share * (1 - share) / num_questions)
    return abs(result["final_acc"] - result["start_acc"]) <= noise


def shuffle_advantages(trainer) -> None:
    """Every response gets the advantage of another one of its batch."""
    objective = trainer.parts.objective
    honest = objective.with_advantages

    def shuffled(batch, *args, **kwargs):
        batch = honest(batch, *args, **kwargs)
        order = torch.randperm(batch.num_sequences, generator=torch.Generator().manual_seed(trainer.step))
        per_row = (batch.advantages * batch.mask).sum(-1) / batch.mask.sum(-1)
        return dataclasses.replace(batch, advantages=per_row[order][:, None] * batch.mask)

    objective.with_advantages = shuffled


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_a_random_reward_changes_nothing(tmp_path, seed):
    result, _ = train(tmp_path, f"trainer.seed={seed}", "algorithm.filter_groups.metric=seq_reward", reward=coin)
    assert within_noise(result), result


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_shuffled_advantages_change_nothing(tmp_path, seed):
    result, _ = train(tmp_path, f"trainer.seed={seed}", patch=shuffle_advantages)
    assert within_noise(result), result
