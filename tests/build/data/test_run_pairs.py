"""Preference pairs from a run's groups: which answers stand against which, and which questions are held out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gspo.build.data.run_pairs import pairs_of_runs, run_pairs
from gspo.config import load_supervised
from gspo.data.rows import DataError
from gspo.runs.group_log import write_records


def group(number: int, *answers: tuple[str, float | None, float | None], **more: Any) -> dict[str, Any]:
    """A record of a group; an answer is (text, score, acc)."""
    responses = [{"text": text, "score": score, "acc": acc, **more} for text, score, acc in answers]
    messages = [{"role": "user", "content": f"question {number}"}]
    facts = {"uid": str(number), "submission": number, "data_source": "mine", "version": 0, "fate": "kept"}
    return {**facts, "messages": messages, "responses": responses}


def make_run(folder: Path, *steps: list[dict[str, Any]]) -> Path:
    (folder / "groups").mkdir(parents=True)
    (folder / "config.yaml").touch()
    for step, records in enumerate(steps, 1):
        write_records(folder / "groups", step, records)
    return folder


def texts(run: Path) -> list[tuple[str, str]]:
    return [(row.extra["chosen"], row.extra["rejected"]) for row in run_pairs(run)]


def test_right_answers_stand_against_wrong_ones_and_each_different_answer_occurs(tmp_path: Path) -> None:
    mixed = group(0, ("a", 1, 1), ("x", 0, 0), ("y", 0, 0), ("b", 1, 1), ("z", 0, 0), ("x", 0, 0))
    assert texts(make_run(tmp_path / "run", [mixed])) == [("a", "x"), ("b", "y"), ("a", "z")]


def test_accuracy_counts_before_the_score_and_missing_rewards_do_not_count(tmp_path: Path) -> None:
    by_rule = group(0, ("right", 0.1, 1), ("wrong", 0.9, 0), ("unknown", None, None))
    by_score = group(1, ("good", 0.9, None), ("middle", 0.5, None), ("bad", 0.1, None))
    alike = group(2, ("a", 1, 1), ("b", 1, 1))
    failed = group(3, ("a", None, None))
    run = make_run(tmp_path / "run", [by_rule, by_score], [alike, failed])
    assert texts(run) == [("right", "wrong"), ("good", "bad")]
    assert [row.messages[0]["content"] for row in run_pairs(run)] == ["question 0", "question 1"]


def test_pairs_come_in_the_order_of_the_steps_however_many_digits_they_have(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    for number, step in enumerate((999_999, 1_000_000)):
        write_records(run / "groups", step, [group(number, (f"right {step}", 1, 1), ("wrong", 0, 0))])
    assert [chosen for chosen, _ in texts(run)] == ["right 999999", "right 1000000"]
    assert [(row.uid, row.data_source) for row in run_pairs(run)] == [("run/0/0", "mine"), ("run/1/0", "mine")]


def test_a_share_of_the_questions_is_held_out_of_all_runs(tmp_path: Path) -> None:
    pair = ("a", 1.0, 1.0), ("b", 0.0, 0.0)
    runs = [make_run(tmp_path / name, [group(n, *pair) for n in range(20)]) for name in ("one", "two")]
    names = f"data.train_files=[{runs[0]},{runs[1]}]"
    train, held_out = pairs_of_runs(load_supervised(None, [names, "data.val_split=0.25"]).config)
    assert train is not None and held_out is not None and (len(train), len(held_out)) == (30, 10)
    asked, kept = ({row.messages[0]["content"] for row in rows} for rows in (train, held_out))
    assert len(asked) == 15 and len(kept) == 5 and not asked & kept
    train, held_out = pairs_of_runs(load_supervised(None, [names, "data.num_train_samples=7"]).config)
    assert train is not None and held_out is not None and (len(train), len(held_out)) == (7, 2)
    train, held_out = pairs_of_runs(load_supervised(None, [f"data.val_files={runs[0]}"]).config)
    assert train is None and held_out is not None and len(held_out) == 20


@pytest.mark.parametrize(
    ("records", "message"),
    [
        ([], "has no groups; train it with trainer.save_groups=true"),
        ([[group(0, ("a", 1, 1))]], "has no group in which one answer is better than another"),
        ([[group(0, ("a", 1, 1), ("b", 0, 0), turns=[{}])]], "has responses of several turns"),
    ],
)
def test_a_run_without_pairs_is_refused(tmp_path: Path, records: list[Any], message: str) -> None:
    run = make_run(tmp_path / "run", *records)
    with pytest.raises(DataError, match=f"run: {message}"):
        run_pairs(run)


def test_runs_and_files_are_not_mixed(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", [group(0, ("a", 1, 1), ("b", 0, 0))])
    config = load_supervised(None, [f"data.train_files=[{run},arithmetic]"]).config
    with pytest.raises(DataError, match="expected run folders only"):
        pairs_of_runs(config)
