from __future__ import annotations

import json
from collections import Counter

import pytest

from gspo.data.tasks.code import LEVELS, load_code, read_problems
from gspo.rewards.graders.code import grade_code, read_tests


def test_there_are_enough_of_every_kind() -> None:
    problems = read_problems()
    assert len(problems) >= 60
    assert len({p["id"] for p in problems}) == len(problems)
    kinds = Counter((p["level"], p["style"]) for p in problems)
    assert min(kinds[level, style] for level in LEVELS for style in ("stdin", "function")) >= 7


def test_splits_share_no_problem_and_levels_rise() -> None:
    train, val = load_code("train"), load_code("val")
    assert len(train) + len(val) == len(read_problems())
    assert len(val) >= 8
    assert not {r.uid.split("/")[-1] for r in train} & {r.uid.split("/")[-1] for r in val}
    levels = [LEVELS.index(r.extra["level"]) for r in train]
    assert levels == sorted(levels)
    assert [r.uid for r in load_code(seed=1)] != [r.uid for r in train]


def test_statements_do_not_hold_their_solutions_or_tests() -> None:
    for problem in read_problems():
        assert problem["solution"].strip() not in problem["statement"]
        assert len(read_tests(problem["tests"])) >= 5
        assert json.loads(json.dumps(problem["tests"])) == problem["tests"]


@pytest.mark.parametrize("level", LEVELS)
def test_reference_solutions_pass_and_constants_do_not(level: str) -> None:
    rows = [r for split in ("train", "val") for r in load_code(split) if r.extra["level"] == level]
    for row in rows:
        assert row.answer is not None
        assert grade_code(row.answer, row.ground_truth).score == 1.0, row.uid
        tests = row.ground_truth
        if "fn_name" in tests:
            first = tests["outputs"][0]
            value = repr(json.loads(first) if isinstance(first, str) else first)
            lazy = f"def {tests['fn_name']}(*args):\n    return {value}"
        else:
            lazy = f"print({tests['outputs'][0].rstrip()!r})"
        assert grade_code(lazy, tests).score == 0.0, row.uid
