from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from gspo.data.datasets import load_rows
from gspo.data.rows import DataError
from gspo.data.tasks.reasoning_gym import final_answer, score

pytest.importorskip("reasoning_gym")


def test_rows_carry_what_their_scorer_needs() -> None:
    rows = load_rows("reasoning_gym:chain_sum,min_terms=2,max_terms=2", limit=20)
    for row in rows:
        extra = json.loads(json.dumps(dict(row.extra)))
        assert score(f"so <answer>{row.ground_truth}</answer>", extra) == 1.0
        assert score(str(row.ground_truth), extra) == 1.0
        assert score(f"<answer>{int(row.ground_truth) + 1}</answer>", extra) < 0.1
        assert row.messages[0]["content"].split("\n")[0].count("+") + row.messages[0]["content"].count(" - ") == 1


def test_splits_differ_and_seeds_repeat() -> None:
    train = {r.messages for r in map(_frozen, load_rows("reasoning_gym:chain_sum", limit=50))}
    val = {r.messages for r in map(_frozen, load_rows("reasoning_gym:chain_sum", "val", limit=50))}
    assert len(train & val) < 3
    again = load_rows("reasoning_gym:chain_sum", limit=10)
    assert again == load_rows("reasoning_gym:chain_sum", limit=10)
    assert again != load_rows("reasoning_gym:chain_sum", limit=10, seed=1)


class _frozen:
    def __init__(self, row) -> None:
        self.messages = row.messages[0]["content"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reasoning_gym:chain_sun", "chain_sum"),
        ("reasoning_gym:", "is not a task"),
        ("reasoning_gym:chain_sum,size=3", "size=3"),
        ("reasoning_gym:chain_sum,min_terms", "key=value"),
        ("reasoning_gym:chain_sum,no_such=1", "refused its options.*no_such"),
        ("reasoning_gym:chain_sum,min_terms=9,max_terms=2", "refused its options"),
    ],
)
def test_bad_names_are_explained(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_rows(name, limit=2)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>5</answer>", "5"),
        ("<answer>4</answer> no, <answer> 5 </answer> yes", "5"),
        ("<answer>5", "5"),
        (" 5 ", "5"),
        ("", ""),
    ],
)
def test_final_answer(text: str, answer: str) -> None:
    assert final_answer(text) == answer


_ROWS = "import json; from gspo.data.datasets import load_rows; rows = {call}; print('\\n' + json.dumps([str(r) for r in rows]))"


def _under(hash_seed: str, call: str) -> list[str]:
    env = os.environ | {"PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", _ROWS.format(call=call)], env=env, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_rows_do_not_depend_on_the_hash_seed() -> None:
    call = "load_rows('reasoning_gym:ransom_note', limit=4)"
    assert _under("0", call) == _under("5", call) == [str(r) for r in load_rows("reasoning_gym:ransom_note", limit=4)]


@pytest.mark.slow
def test_no_other_task_depends_on_the_hash_seed() -> None:
    """The list of those that do is whole."""
    call = (
        "[r for t in __import__('reasoning_gym').factory.DATASETS if t != 'composite' "
        "for r in load_rows('reasoning_gym:' + t, limit=4)]"
    )
    fixed, other = _under("0", call), _under("5", call)
    assert fixed and [a for a, b in zip(fixed, other, strict=True) if a != b] == []
