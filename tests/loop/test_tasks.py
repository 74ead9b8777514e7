"""One training step of every built-in task on a small random model: data, template, generation, reward, update."""

from __future__ import annotations

import json

import pytest

from gspo.loop.trainer import Trainer
from gspo.runs.console import Console
from tests.support.small_run import config, make_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)


def gsm8k_file(folder):
    path = folder / "gsm8k.jsonl"
    rows = [
        {"question": f"Ann has {i} pears and buys 2. How many?", "answer": f"{i}+2={i + 2}\n#### {i + 2}"}
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return path


@pytest.mark.parametrize("task", ["gsm8k", "math", "code", "mixed", "reasoning_gym:basic_arithmetic,max_terms=3"])
def test_a_step_of_each_task(tmp_path, model, task):
    name = f"gsm8k:{gsm8k_file(tmp_path)}" if task == "gsm8k" else task
    resolved = config(
        tmp_path,
        model,
        f"data.train_files={name}",
        f"data.val_files={name}",
        "data.num_train_samples=8",
        "data.num_val_samples=2",
        "data.max_prompt_length=3000",
        "trainer.total_training_steps=1",
        "algorithm.filter_groups.enable=false",
        "actor_rollout_ref.rollout.n=2",
    )
    result = Trainer(resolved, console=Console(enabled=False)).fit()
    row = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1]
    assert result["steps"] == 1
    assert row["train/reward_failures"] == 0
    assert row["train/groups_trained"] == 4
    assert row["critic/score_all/mean"] < 0.1  # random bytes answer nothing; reasoning-gym gives a trifle for any text
