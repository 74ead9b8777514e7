"""Run cards and model cards of every kind of run: what they say about the reward, the data and how to load the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gspo.report.model_card import model_card
from gspo.report.run_card import run_card
from gspo.report.verdict import judge
from gspo.runs.run import Run, read_run

MODEL, FILES = "actor_rollout_ref.model.path", "data.train_files"
PAIRS = [
    {"step": 0, "val/accuracy": 0.5, "val/sign_accuracy": 0.4375, "val/loss": 0.7},
    {"step": 1, "train/loss": 0.6, "train/sign_accuracy": 0.5},
    {"step": 2, "train/loss": 0.5, "train/sign_accuracy": 0.6, "val/accuracy": 0.75, "val/sign_accuracy": 0.625, "val/loss": 0.25},
]  # fmt: skip
ANSWERS = [{"step": 1, "train/loss": 2.0, "val/loss": 3.0}, {"step": 2, "train/loss": 1.0, "val/loss": 1.5}]
REWARDS = [{"step": 1, "critic/score/mean": 0.25}, {"step": 2, "critic/score/mean": 0.5}]


def make(folder: Path, rows: list[dict[str, Any]], settings: dict[str, Any], **environment: Any) -> Run:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    records = [{"key": key, "value": value, "origin": "default"} for key, value in settings.items()]
    (folder / "config.json").write_text(json.dumps(records))
    (folder / "environment.json").write_text(json.dumps(environment))
    return read_run(folder)


def line(card: str, title: str) -> str:
    """The cell beside a title of a table."""
    (found,) = [row for row in card.splitlines() if row.startswith(f"| {title} |")]
    return found.removeprefix(f"| {title} | ").removesuffix(" |")


def test_the_card_of_a_reward_model_says_how_it_is_loaded_repeated_and_used(tmp_path: Path) -> None:
    run = make(tmp_path / "rm", PAIRS, {MODEL: "org/base", FILES: "pairs.jsonl", "data.train_batch_size": 64})
    card = model_card(run, "me/judge", 2)
    head = "---\nlibrary_name: transformers\npipeline_tag: text-classification\ntags:\n- gspo\n- reward-model\n"
    assert card.startswith(head + "base_model: org/base\n---\n")
    assert 'AutoModelForSequenceClassification.from_pretrained("me/judge")' in card and "CausalLM" not in card
    assert "reward_model.path=me/judge`" in card and "gspo serve" not in card
    assert "gspo rm config.yaml" in card and "These weights are from step 2 of rm." in card
    assert line(card, "training data") == "pairs of pairs.jsonl" and line(card, "pairs per step") == "64"
    assert line(card, "share in the right order") == "0.5000 | 0.7500"
    assert line(card, "share of answers on the right side of 0") == "0.4375 | 0.6250"
    assert line(card, "loss") == "0.7000 | 0.2500"
    assert "Measured on held-out pairs only." in card
    assert " on the pairs of pairs.jsonl: 2 steps." in card
    assert "No held-out pairs." in run_card(make(tmp_path / "rm", [PAIRS[1]], {}))


def test_the_card_of_a_supervised_run(tmp_path: Path) -> None:
    run = make(tmp_path / "sft", ANSWERS, {MODEL: "org/base", FILES: "a.jsonl", "data.train_batch_size": 8})
    card = model_card(run, "me/model")
    assert "pipeline_tag: text-generation\ntags:\n- gspo\n- supervised-fine-tuning\n" in card
    assert 'AutoModelForCausalLM.from_pretrained("me/model")' in card and "gspo sft config.yaml" in card
    assert "These weights" not in card
    assert (line(card, "start"), line(card, "end")) == ("3.0000", "1.5000")
    assert line(card, "training data") == "answers of a.jsonl" and line(card, "examples per step") == "8"
    assert judge(run).headline == "Held-out loss fell from 3.000 to 1.500" and not run.is_reward_model
    given = make(
        tmp_path / "sft", ANSWERS, {FILES: "a.jsonl"}, inputs={"train_dataset": "12 rows", "val_dataset": "3 rows"}
    )
    assert line(run_card(given), "training data") == "answers of 12 rows"
    assert line(run_card(given), "held-out data") == "3 rows"


CUSTOM = {"custom_reward_function.path": "/home/me/r.py", "custom_reward_function.name": "score"}


@pytest.mark.parametrize(
    ("settings", "inputs", "reward"),
    [
        ({}, {}, "built in, by data source"),
        ({"reward.functions": [], "reward_model.enable": False, "environment.name": None}, {}, "built in, by data source"),
        (CUSTOM, {}, "…/r.py:score"),
        (CUSTOM, {"reward_fn": "my_function"}, "my_function"),
        ({**CUSTOM, "reward.functions": [{"name": "math"}]}, {}, "math"),
        ({"reward.functions": [{"name": "math"}, {"name": "f", "path": "/home/me/r.py"}]}, {}, "math, …/r.py:f"),
        ({"reward.judge.base_url": "https://h/v1", "reward.judge.model": "org/big"}, {}, "the judge org/big"),
        ({"reward.functions": [{"judge": {}, "name": "style"}], "reward.judge.model": "m"}, {}, "the judge m"),
        ({"reward_model.enable": True, "reward_model.path": "/home/me/rm"}, {}, "the reward model …/rm"),
        ({"reward.functions": [{"name": "math"}, {"model": "org/rm"}]}, {}, "math, the reward model org/rm"),
        ({"reward.functions": [{"model": {}}], "reward_model.path": "org/rm"}, {}, "the reward model org/rm"),
        ({"environment.name": "tools", **CUSTOM}, {}, "the environment tools, …/r.py:score"),
        ({"environment.path": "/home/me/env.py"}, {}, "the environment …/env.py"),
        ({"reward.functions": "odd", "reward_model.enable": "odd"}, [1], "built in, by data source"),
    ],
)  # fmt: skip
def test_the_card_names_what_responses_were_rewarded_by(tmp_path: Path, settings, inputs, reward) -> None:
    card = run_card(make(tmp_path / "run", REWARDS, {FILES: "arithmetic", **settings}, inputs=inputs))
    assert line(card, "reward") == reward and "gspo train config.yaml" in card and "- reinforcement-learning" in card
