"""Training with an environment: what is recorded, and a resume to the same bits after a kill in the middle of a turn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from gspo.loop.trainer import Trainer
from gspo.runs.console import Console
from gspo.runs.group_log import read_groups
from tests.loop.episode_run import MARKS, OVERRIDES
from tests.support.preloaded import preloaded_python
from tests.support.small_run import config, final_state, make_model

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"), initializer_range=0.4)


def program(folder: Path, model: Path, *overrides: str) -> list[str]:
    return [preloaded_python(), "-m", "tests.loop.episode_run", str(folder), str(model), *overrides]


def start(command: list[str], marks: Path) -> subprocess.Popen[bytes]:
    environment = {**os.environ, MARKS: str(marks), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    )


def finish(child: subprocess.Popen[bytes]) -> int:
    child.communicate()
    return child.returncode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, model: Path) -> tuple[Path, int]:
    """A run without interruption, and how many answers its environments gave."""
    folder = tmp_path_factory.mktemp("whole")
    marks = folder / "marks"
    assert finish(start(program(folder, model), marks)) == 0
    return folder / "run", marks.stat().st_size


def test_rollouts_have_turns_and_metrics_count_the_models_tokens(whole: tuple[Path, int]) -> None:
    run, _ = whole
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    trained = [row for row in rows if "critic/score/mean" in row]
    assert len(trained) == 4
    for row in trained:
        assert 1 <= row["num_turns/mean"] <= 3 and row["num_turns/max"] <= 3 and row["tool_calls/max"] == 0
        assert row["environment/failures"] == 0 and row["environment/seconds"] >= 0
        assert row["response_length/max"] <= 24
    assert max(row["num_turns/max"] for row in trained) > 1
    assert all("val-aux/guess/num_turns/mean" in row for row in rows if "val-core/guess/acc/mean@1" in row)
    groups = [g for file in sorted((run / "groups").glob("*.gz")) for g in read_groups(file)]
    for group in groups:
        assert group["messages"][-1]["content"].startswith("n") and group["prompt_ids"]
        for response in group["responses"]:
            turns = response["turns"]
            assert response["num_tokens"] == sum(turn["end"] - turn["start"] for turn in turns)
            assert response["score"] == pytest.approx(sum(turn["reward"] for turn in turns))
            if "loss_mask" in response:
                assert sum(response["loss_mask"]) == response["num_tokens"]


@pytest.mark.parametrize("share", [pytest.param(0.35, marks=pytest.mark.slow), 0.6])
def test_a_run_killed_in_the_middle_of_a_turn_goes_on_to_the_same_bits(
    tmp_path: Path, model: Path, whole: tuple[Path, int], share: float
) -> None:
    run, num_answers = whole
    marks = tmp_path / "marks"
    child = start(program(tmp_path, model), marks)
    saved = tmp_path / "run" / "checkpoints"
    while child.poll() is None:
        if marks.exists() and marks.stat().st_size >= share * num_answers and list(saved.glob("step-*")):
            break
        time.sleep(0.01)
    assert child.poll() is None, "the run ended before it could be killed"
    os.kill(child.pid, signal.SIGKILL)
    child.communicate()
    assert finish(start(program(tmp_path, model), tmp_path / "more")) == 0
    assert final_state(tmp_path / "run") == final_state(run)


def test_a_run_with_carried_episodes_saves_them_with_their_turns(whole: tuple[Path, int]) -> None:
    run, _ = whole
    unfinished = []
    for folder in sorted((run / "checkpoints").glob("step-*")):
        state = json.loads((folder / "training" / "state.json").read_text())
        unfinished += [part for request in state["sampler"]["unfinished"] for part in request["partial"]]
    assert any(part.get("turns") for part in unfinished), "no checkpoint has an episode that was under way"


def test_tools_may_be_functions_of_the_caller(tmp_path: Path, model: Path) -> None:
    def double(number: str) -> str:
        """Twice a number."""
        return str(2 * int(number))

    resolved = config(
        tmp_path,
        model,
        "data.max_response_length=12",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.rollout.multi_turn.format=tag",
        "algorithm.filter_groups.enable=false",
    )
    trainer = Trainer(
        resolved,
        reward_fn=lambda prompt, response: float(len(response)),
        environment=[double],
        console=Console(enabled=False),
    )
    assert trainer.fit()["steps"] == 1
    (row,) = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()][-1:]
    assert row["num_turns/min"] == 1 and row["tool_calls/share"] >= 0


def test_an_unknown_environment_is_named_before_weights_are_loaded(tmp_path: Path, model: Path) -> None:
    resolved = config(tmp_path, model, *OVERRIDES[2:], "environment.name=calculater")
    with pytest.raises(ValueError, match=r"environment\.name='calculater' is unknown: did you mean 'calculator'"):
        Trainer(resolved, console=Console(enabled=False))
