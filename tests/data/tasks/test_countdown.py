from __future__ import annotations

import pytest

from gspo.data.datasets import load_rows
from gspo.data.tasks.countdown import TARGETS, load_countdown, score


def test_every_answer_of_the_task_is_right() -> None:
    for split in ("train", "val"):
        for row in load_countdown(split, limit=300):
            assert score(row.answer or "", int(row.ground_truth), row.extra["numbers"]) == 1.0, row
            assert int(row.ground_truth) in TARGETS
            assert len(row.extra["numbers"]) in (3, 4)


def test_the_steps_are_right() -> None:
    for row in load_countdown(limit=200):
        *steps, _ = (row.answer or "").splitlines()
        assert len(steps) == len(row.extra["numbers"]) - 1
        for step in steps:
            left, _, value = step.partition(" = ")
            assert eval(left) == int(value)


def test_the_two_sets_do_not_overlap_and_repeat() -> None:
    train, val = load_rows("countdown", limit=2000), load_rows("countdown", "val", limit=200)
    texts = [row.messages[0]["content"] for row in [*train, *val]]
    assert len(set(texts)) == len(texts)
    assert load_countdown(limit=50, seed=1) == load_countdown(limit=50, seed=1) != load_countdown(limit=50, seed=2)


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<answer>(8 - 2) * 5</answer>", 1),
        ("no: <answer>8 + 2 + 5</answer> then <answer> 5*(8-2) </answer>", 1),
        ("<answer>5*8/(2*2)*3</answer>", 0),  # 2 twice
        ("<answer>30</answer>", 0),
        ("<answer>5*6</answer>", 0),
        ("<answer>(8 - 2) * 5", 0),
        ("(8 - 2) * 5", 0),
        ("<answer>(8 - 2) * 5 = 30</answer>", 0),
        ("<answer>5*(8-2)**1</answer>", 0),
        ("<answer>8/(5-5)+2</answer>", 0),
        ("<answer>5*-(2-8)</answer>", 0),
        ("<answer>__import__('os')</answer>", 0),
        ("<answer>" + "(" * 5000 + "</answer>", 0),
        ("<answer>5*(8-2.0)</answer>", 0),
        ("<answer>5*(8-True)</answer>", 0),
    ],
)
def test_the_score(text: str, right: int) -> None:
    assert score(text, 30, [5, 8, 2]) == right


def test_quotients_are_exact() -> None:
    assert score("<answer>6 / (1 - 3 / 4)</answer>", 24, [6, 1, 3, 4]) == 1.0
    assert score("<answer>7 / 3 * 9</answer>", 21, [3, 7, 9]) == 1.0
