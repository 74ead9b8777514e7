from __future__ import annotations

import pytest

from gspo.data.tasks.arithmetic import load_arithmetic, score, work_out


def question(row) -> str:
    return row.messages[0]["content"]


def test_train_and_held_out_never_meet_for_any_seed() -> None:
    held_out = {question(r) for r in load_arithmetic("val")}
    assert len(held_out) == 512
    for seed in range(3):
        train = {question(r) for r in load_arithmetic("train", limit=6000, seed=seed)}
        assert len(train) == 6000
        assert not train & held_out


def test_truth_is_the_sum_of_three_or_four_numbers_below_100() -> None:
    for row in load_arithmetic("train", limit=500):
        terms = [int(t) for t in question(row).removesuffix("=").split("+")]
        assert len(terms) in (3, 4)
        assert all(0 < t < 100 for t in terms)
        assert row.ground_truth == str(sum(terms))
        assert score(row.answer, row.ground_truth) == 1.0


def test_a_third_of_the_answers_is_worked_out() -> None:
    rows = load_arithmetic("train", limit=6000)
    share = sum(";" in r.answer for r in rows) / len(rows)
    assert abs(share - 1 / 3) < 4 * (2 / 9 / 6000) ** 0.5


def test_the_same_seed_gives_the_same_rows_and_a_limit_a_prefix() -> None:
    assert load_arithmetic(limit=100) == load_arithmetic(limit=300)[:100]
    assert load_arithmetic(limit=100, seed=1) != load_arithmetic(limit=100)


def test_work_out() -> None:
    assert work_out([23, 45, 7]) == "23+45=68;68+7=75;75"
    assert work_out([1, 2, 3, 4]) == "1+2=3;3+3=6;6+4=10;10"


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("75", 1.0),
        (" 75\n", 1.0),
        ("23+45=68;68+7=75;75", 1.0),
        ("nonsense;75", 1.0),
        ("75;", 0.0),
        ("75;74", 0.0),
        ("075", 0.0),
        ("75.0", 0.0),
        ("+75", 0.0),
        ("", 0.0),
        ("68+7=75", 0.0),
        ("7 5", 0.0),
    ],
)
def test_score_is_exact(text: str, right: float) -> None:
    assert score(text, "75") == right
    assert score(text, 75) == right
