"""The named recipes: a model learns to use a tool because its answers are right, and to play a game turn by turn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo.config import load
from gspo.loop.trainer import Trainer
from gspo.runs.console import Console

ROOT = Path(__file__).parents[2]
SHUFFLED = ROOT / "recipes" / "proof" / "shuffled_calculator.py"
AGENT = ROOT / "examples" / "calculator_agent.py"


def train(name: str, folder: Path, *overrides: str) -> dict[str, Any]:
    words = [f"trainer.default_local_dir={folder}", "trainer.save_freq=-1", "trainer.num_threads=1"]
    return Trainer(load(name, [*words, *overrides]), console=Console(enabled=False)).fit()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_calculator_is_called_because_it_helps(tmp_path: Path, seed: int) -> None:
    result = train("calculator", tmp_path, f"trainer.seed={seed}")
    assert result["start_acc"] <= 0.30 and result["final_acc"] >= 0.85
    assert result["tool_calls_start"] < 1 / 3 and result["tool_calls_final"] > 0.9


@pytest.mark.slow
def test_a_calculator_that_answers_another_question_is_not_called(tmp_path: Path) -> None:
    shuffled = (f"environment.path={SHUFFLED}", "environment.name=ShuffledCalculator")
    result = train("calculator", tmp_path, *shuffled, "algorithm.filter_groups.enable=false")
    assert result["final_acc"] <= 0.30 and result["tool_calls_final"] < 1 / 3


@pytest.mark.slow
def test_an_agent_with_an_openai_client_learns_what_the_built_in_environment_teaches(tmp_path: Path) -> None:
    agent = (f"environment.agent={AGENT}", "environment.name=null", "actor_rollout_ref.rollout.multi_turn.format=tag")
    result = train("calculator", tmp_path, *agent)
    assert result["start_acc"] <= 0.30 and result["final_acc"] >= 0.85
    assert result["tool_calls_start"] < 1 / 3 and result["tool_calls_final"] > 0.9


@pytest.mark.slow
@pytest.mark.parametrize("credit", ["return_to_go", "outcome"])
def test_guessing_becomes_bisection(tmp_path: Path, credit: str) -> None:
    result = train("guess", tmp_path, f"algorithm.turn_rewards={credit}")
    assert result["final_acc"] >= result["start_acc"] + 0.30
