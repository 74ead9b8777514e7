"""Training with vLLM from the command line and the loop: the native run's batches, faults, asynchrony."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gspo.loop import ending
from gspo.loop.trainer import Trainer
from gspo.rollout.workers.fleet import Fleet
from gspo.runs.console import Console
from tests.loop.episode_run import OVERRIDES
from tests.support.small_run import config, even_first_byte, final_state

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("no_process_left")]
VLLM = "actor_rollout_ref.rollout.name=vllm"
ROUNDS = "algorithm.filter_groups.strategy=rounds"  # batches then do not depend on how many tokens a step makes
REWARD = """
def even_first(data_source, solution_str, ground_truth, extra_info=None):
    return float(bool(solution_str) and ord(solution_str[0]) % 2 == 0)
"""


@pytest.fixture(autouse=True)
def _without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "write_report", lambda console, run: None)


def _rows(run: Path) -> list[dict[str, Any]]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["step"] > 0]


def _train(folder: Path, model: Path, *overrides: str, kill_in_step: int | None = None) -> list[dict[str, Any]]:
    """Train; the rows. In a step, the rollout worker is killed right after it was given its first groups."""
    trainer = Trainer(config(folder, model, *overrides), reward_fn=even_first_byte, console=Console(enabled=False))
    if kill_in_step is not None:
        _kill_worker(trainer, kill_in_step)
    trainer.fit()
    return _rows(folder / "run")


def _kill_worker(trainer: Trainer, step: int) -> None:
    engine = trainer.parts.engine
    assert isinstance(engine, Fleet)
    advance, killed = engine.step, []

    def killing() -> list[Any]:
        groups = advance()
        if trainer.step + 1 == step and not killed:
            killed.append(engine.slots[0].connection.pid)
            os.kill(killed[0], signal.SIGKILL)
        return groups

    engine.step = killing


@pytest.mark.parametrize("backend", ["local", "ray"])
def test_gspo_train_with_vllm_agrees_with_the_trainer_after_every_update(backend, model_folder, tmp_path):
    if backend == "ray":
        pytest.importorskip("ray")
    reward = tmp_path / "reward.py"
    reward.write_text(REWARD)
    resolved = config(tmp_path, model_folder, VLLM, ROUNDS, "trainer.total_training_steps=5")
    (tmp_path / "config.yaml").write_text(resolved.to_yaml())
    command = [
        *(str(Path(sys.executable).with_name("gspo")), "train", str(tmp_path / "config.yaml")),
        *(f"custom_reward_function.path={reward}", "custom_reward_function.name=even_first"),
        f"trainer.backend={backend}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    rows = _rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    for row in rows:
        furthest = max(abs(math.log(row[f"actor/rollout_ratio_token/{end}"])) for end in ("min", "max"))
        assert furthest < 1e-3 and row["rollout/worker_restarts"] == 0
        assert row["actor/grad_norm"] > 0


def test_a_run_with_vllm_trains_what_the_native_run_trains(model_folder, tmp_path):
    native = _train(tmp_path / "native", model_folder, ROUNDS)
    vllm = _train(tmp_path / "vllm", model_folder, ROUNDS, VLLM)
    for name in ("critic/score/mean", "response_length/mean", "train/generated_tokens"):
        assert [row[name] for row in vllm] == [row[name] for row in native]
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        assert [row[name] for row in vllm] == pytest.approx([row[name] for row in native], rel=1e-3, abs=1e-5)


def test_rollouts_with_turns_are_those_of_the_native_engine(model_folder, tmp_path):
    native = _train(tmp_path / "native", model_folder, ROUNDS, *OVERRIDES)
    vllm = _train(tmp_path / "vllm", model_folder, ROUNDS, VLLM, *OVERRIDES)
    for name in ("critic/score/mean", "response_length/mean", "num_turns/mean", "environment/failures"):
        assert [row[name] for row in vllm] == [row[name] for row in native]
    assert max(row["num_turns/max"] for row in vllm) > 1
    for name in ("actor/pg_loss", "actor/grad_norm"):
        assert [row[name] for row in vllm] == pytest.approx([row[name] for row in native], rel=1e-3, abs=1e-5)


def test_a_killed_engine_is_replaced_and_its_groups_are_generated_again_to_the_same_bits(model_folder, tmp_path):
    steps = "trainer.total_training_steps=3"
    _train(tmp_path / "quiet", model_folder, VLLM, steps)
    rows = _train(tmp_path / "killed", model_folder, VLLM, steps, kill_in_step=2)
    assert [row["rollout/worker_restarts"] for row in rows] == [0, 1, 1]
    quiet, killed = (final_state(tmp_path / name / "run") for name in ("quiet", "killed"))
    assert killed == quiet


def test_asynchronous_rollouts_stay_within_their_budget_across_weight_updates(model_folder, tmp_path):
    budget = 2
    rows = _train(
        tmp_path,
        model_folder,
        VLLM,
        "actor_rollout_ref.rollout.mode=async",
        f"actor_rollout_ref.rollout.max_head_offpolicyness={budget}",
        "actor_rollout_ref.actor.use_decoupled_loss=true",
        "trainer.total_training_steps=5",
    )
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    staleness = [value for row in rows for name, value in row.items() if name == "train/staleness/max"]
    assert len(staleness) == 5 and max(staleness) <= budget


def test_a_model_that_vllm_cannot_run_ends_the_run_with_the_cause(tmp_path):
    with pytest.raises(ValueError, match=r"36 dimensions.*rollout\.name=native"):
        _train(tmp_path, Path("embedded"), VLLM)
