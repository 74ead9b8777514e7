"""Runs of `gspo rm` on the answers of another run: what they leave, and resume to the bit."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from gspo.build.data.given import Inputs
from gspo.build.supervised.preferences import build_preferences
from gspo.config import load_supervised
from gspo.data.rows import DataError
from gspo.loop import ending
from gspo.loop.preferences import RewardModelTrainer
from gspo.models.load import load_reward_model
from gspo.runs.console import Console
from gspo.runs.group_log import write_records
from tests.loop.runs import fit
from tests.loop.supervised_runs import SMALL
from tests.support.small_run import final_state, make_model


@pytest.fixture(autouse=True)
def without_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ending, "write_report", lambda console, run: None)


def make_graded(folder: Path) -> Path:
    """A run folder with 40 questions, each answered rightly and wrongly."""
    records = [
        {
            "uid": str(number),
            "submission": number,
            "data_source": "arithmetic",
            "messages": [{"role": "user", "content": f"{number}+1="}],
            "responses": [{"text": str(number + add), "score": float(add == 1), "acc": None} for add in (1, 2, 3)],
        }
        for number in range(40)
    ]
    (folder / "groups").mkdir(parents=True)
    (folder / "config.yaml").touch()
    write_records(folder / "groups", 1, records)
    return folder


def train(folder: Path, data: Path, model: Path, stop_after: int | None = None) -> dict[str, Any]:
    words = (f"actor_rollout_ref.model.path={model}", f"trainer.default_local_dir={folder}", f"data.train_files={data}")
    trainer = RewardModelTrainer(
        load_supervised(None, [*words, *SMALL]), out=folder / "scores", console=Console(enabled=False)
    )
    return fit(trainer, stop_after)


def test_it_trains_on_a_run_and_a_stopped_one_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    data, model = make_graded(tmp_path / "graded"), make_model(tmp_path / "model")
    result = train(tmp_path / "whole", data, model)
    assert result["steps"] == 4 and result["num_pairs"] == 64  # of 76: data.num_train_samples
    rows = [json.loads(line) for line in (tmp_path / "whole" / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[1]["train/loss"] == pytest.approx(math.log(2)) != rows[2]["train/loss"]  # all scores begin at 0
    assert {"val/accuracy", "val/sign_accuracy"} <= set(rows[-1])
    classifier = load_reward_model(result["out"])
    assert classifier.score.weight.any() and classifier.config.reward_std > 0
    train(tmp_path / "stopped", data, model, stop_after=2)
    assert not (tmp_path / "stopped" / "scores").exists()
    train(tmp_path / "stopped", data, model)
    assert final_state(tmp_path / "stopped" / "run") == final_state(tmp_path / "whole" / "run")


def test_a_pair_is_left_out_where_either_answer_is_too_long(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    question = {"prompt": "1+1="}
    pairs = [("2", "3"), ("2", "3" * 40), ("2" * 40, "3")]
    rows = [{**question, "chosen": chosen, "rejected": rejected} for chosen, rejected in pairs]
    words = (f"actor_rollout_ref.model.path={model}", "data.max_length=30")
    config = load_supervised(None, [*SMALL, *words]).config
    parts = build_preferences(config, Inputs(train_dataset=rows, val_dataset=rows[:1]))
    assert len(parts.order.examples) == 1 and len(parts.held_out) == 1
    assert "2 train pairs are longer than data.max_length=30 tokens and are left out" in parts.notes
    with pytest.raises(DataError, match="all 2 train pairs are longer; raise it"):
        build_preferences(config, Inputs(train_dataset=rows[1:], val_dataset=rows[:1]))
