"""Rows of a run: lists and patterns of files, a held-out share of them, and what is said about guessed columns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gspo.build.data.rows import rows_of_split
from gspo.config import ConfigErrors, load
from gspo.data.columns import Columns
from gspo.loop.supervised import SupervisedTrainer
from gspo.loop.trainer import Trainer
from gspo.runs.console import Console
from tests.support.small_run import config, even_first_byte


@pytest.fixture
def csv(tmp_path: Path) -> Path:
    file = tmp_path / "sums.csv"
    file.write_text("question,solution\n" + "".join(f"{i}+1=,{i + 1}\n" for i in range(20)))
    return file


def questions(*overrides: str) -> tuple[list[str], list[str]]:
    c = load(None, list(overrides)).config
    train, val = (rows_of_split(c, None, split, Columns()) for split in ("train", "val"))
    return [r.messages[-1]["content"] for r in train], [r.messages[-1]["content"] for r in val]


def test_a_share_of_a_file_is_held_out(csv: Path) -> None:
    everything, nothing = questions(f"data.train_files={csv}")
    assert (len(everything), nothing) == (20, [])
    train, val = questions(f"data.train_files={csv}", "data.val_split=0.2")
    assert (len(train), len(val)) == (16, 4)
    assert [q for q in everything if q not in val] == train
    assert questions(f"data.train_files={csv}", "data.val_split=0.2", "trainer.seed=7") == (train, val)
    few = questions(
        f"data.train_files={csv}", "data.val_split=0.2", "data.num_train_samples=3", "data.num_val_samples=2"
    )
    assert few == (train[:3], val[:2])


def test_a_list_of_files_shares_one_held_out_part(csv: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    copy.write_text(json.dumps([{"question": f"{i}+1=", "answer": i + 1} for i in range(10, 30)]))
    train, val = questions(f"data.train_files=[{csv},{copy}]", "data.val_split=0.2")
    assert len({*train, *val}) == 30 and len(set(val)) == 6 and len(train) + len(val) == 40
    assert not set(train) & set(val)
    # The columns of each file are found by themselves.
    same = questions(f"data.train_files={tmp_path}/*.[cj]s*", "data.val_split=0.2")
    assert {*same[0]} == {*train} and {*same[1]} == {*val}


def test_a_task_keeps_its_own_held_out_part_and_named_files_theirs(csv: Path) -> None:
    train, val = questions(f"data.train_files=[arithmetic,{csv}]", "data.val_split=0.2")
    own_train, own_val = questions("data.train_files=arithmetic")
    assert train[:-16] == own_train and val[:-4] == own_val
    assert len(questions(f"data.train_files={csv}", f"data.val_files={csv}")[1]) == 20
    (warning,) = load(None, [f"data.train_files={csv}", f"data.val_files={csv}", "data.val_split=0.2"]).warnings
    assert "data.val_split" in str(warning) and "data.val_files names the held-out data" in str(warning)


@pytest.mark.parametrize("share", ["0", "1", "-0.1", "5"])
def test_a_share_is_between_0_and_1(share: str) -> None:
    with pytest.raises(ConfigErrors, match=r"data\.val_split"):
        load(None, [f"data.val_split={share}"])


def test_a_pattern_without_files_is_refused_with_the_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigErrors, match="no such file"):
        load(None, [f"data.train_files={tmp_path}/*.jsonl"])


def open_run(kind, folder: Path, model: Path, *overrides: str, **inputs):
    run = kind(config(folder, model, *overrides), console=Console(enabled=False), **inputs)
    run.close()
    return run


def test_a_run_says_which_columns_it_uses(csv: Path, tmp_path: Path, model: Path) -> None:
    keys = (f"data.train_files={csv}", "data.val_split=0.2", "data.num_train_samples=null", "data.num_val_samples=null")
    run = open_run(Trainer, tmp_path, model, *keys, reward_fn=even_first_byte)
    said = f"{csv}: the question is column 'question', the correct answer is column 'solution'"
    assert run.parts.summary(tmp_path, 4).count(said) == 1
    assert len(run.parts.evaluator.prompts) == 4
    run = open_run(SupervisedTrainer, tmp_path / "sft", model, *keys)
    assert run.parts.summary(tmp_path, 4).count(f"{csv}: the question is column 'question'") == 1
    assert (len(run.parts.order.examples), len(run.parts.held_out)) == (16, 4)


def test_rows_passed_in_python_are_split_too(tmp_path: Path, model: Path) -> None:
    rows = [{"question": f"{i}+1=", "solution": i + 1} for i in range(20)]
    keys = ("data.num_train_samples=null", "data.num_val_samples=null")
    run = open_run(Trainer, tmp_path / "a", model, *keys, train_dataset=rows, reward_fn=even_first_byte)
    assert run.parts.evaluator is None
    keys = (*keys, "data.val_split=0.2")
    run = open_run(Trainer, tmp_path / "b", model, *keys, train_dataset=rows, reward_fn=even_first_byte)
    held_out = {p.messages[-1]["content"] for p in run.parts.evaluator.prompts}
    assert len(held_out) == 4 and "train_dataset: the question is column 'question'" in run.parts.summary(tmp_path, 4)
    facts = json.loads((tmp_path / "b" / "run" / "environment.json").read_text())["inputs"]
    assert facts["val_dataset"] == "0.2 of the training rows"
