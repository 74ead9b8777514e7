"""The rows of the built-in tasks are fixed: a run that is resumed, or repeated later, must meet the same ones."""

from __future__ import annotations

import hashlib
import json
import random

import pytest

from gspo.data.datasets import load_rows
from gspo.data.rows import DataError
from gspo.data.tasks import arithmetic, guess
from gspo.data.tasks.countdown import final_answer, score
from gspo.data.tasks.splits import is_held_out, num_rows


def digest(name: str, split: str, seed: int) -> str:
    rows = load_rows(name, split, limit=60, seed=seed)  # type: ignore[arg-type]
    facts = [[r.uid, r.messages, r.data_source, r.ground_truth, r.answer, dict(r.extra)] for r in rows]
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:12]


# task → the digests of its first training rows, of its held-out rows, and of training rows with another seed
FROZEN = {
    "arithmetic": ("5266b572c5ba", "d6d7f22e5e6f", "68175cde1ea6"),
    "calculator": ("7f85787dce63", "b9145f964e50", "f5a59a2bb211"),
    "countdown": ("a74c9c971b45", "f8d39e8c906f", "39c15ab852f2"),
    "guess": ("4b09339fa484", "4de2758d837b", "0ebd12cfda6a"),
    "math": ("04c121adf601", "bfa61335397a", "89791c4e6e85"),
    "reasoning": ("429ae7bc079d", "90451f8d6d9d", "2ed3cd6c55f9"),
    "mixed": ("75c7b8720515", "2260a8ca2283", "773c52c39206"),
    "code": ("b8137cdc023c", "eb9ee4a89269", "67af6a428f6d"),
}
HELD_OUT = ["5", "23"]
PAIRS, GAMES = "bbfda0508e20", "9783dae26a5a"


@pytest.mark.parametrize("name", sorted(FROZEN))
def test_the_rows_of_a_task_stay_the_same(name: str) -> None:
    assert (digest(name, "train", 0), digest(name, "val", 0), digest(name, "train", 7)) == FROZEN[name]


def test_the_sizes_of_splits_and_which_text_is_held_out() -> None:
    assert [num_rows("train", None), num_rows("val", None), num_rows("val", 3), num_rows("val", 0)] == [8192, 512, 3, 0]
    assert [num_rows("train", None, 5, 6), num_rows("val", None, 5, 6), num_rows("train", 7, 5, 6)] == [5, 6, 7]
    assert [text for text in map(str, range(60)) if is_held_out(text)] == HELD_OUT
    assert all(is_held_out(text, 1) for text in "abc")
    with pytest.raises(DataError, match="cannot make 1000001 questions; expected at most 1000000"):
        load_rows("arithmetic", limit=1_000_001)


def test_pairs_of_sums_stay_the_same() -> None:
    pairs = [arithmetic.preference("23+45+7=", draw) for draw in range(40)]
    assert hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:12] == PAIRS


def test_a_game_follows_its_hints_and_ends_when_the_number_is_found() -> None:
    for seed in range(60):
        number = 1 + seed % guess.HIGH
        messages = guess.play(number, random.Random(seed))
        guesses = [int(m["content"]) for m in messages if m["role"] == "assistant"]
        hints = [m["content"] for m in messages if m["role"] == "user"]
        assert [m["role"] for m in messages] == (["assistant", "user"] * len(guesses))[: len(messages)]
        assert hints == ["higher" if g < number else "lower" for g in guesses[:-1]]
        assert len(guesses) == guess.NUM_GUESSES or guesses[-1] == number
        assert len(guesses) <= guess.NUM_GUESSES and number not in guesses[:-1]
        low, high = 1, guess.HIGH
        for one in guesses:
            assert low <= one <= high
            low, high = (one + 1, high) if one < number else (low, one - 1)
    games = [[m["content"] for m in guess.play(20, random.Random(seed))] for seed in range(40)]
    assert hashlib.sha256(json.dumps(games).encode()).hexdigest()[:12] == GAMES


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>1</answer><answer> 2 </answer>", "2"),
        ("<answer>1</answer></answer>", "1"),
        ("<answer>1</answer><answer>2", None),
        ("1</answer>", None),
        ("", None),
    ],
)
def test_the_final_answer_of_countdown(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_limits_of_an_expression() -> None:
    spaces = " " * 196
    assert score(f"<answer>2{spaces}+ 3</answer>", 5, [3, 2]) == 1.0  # 200 characters
    assert score(f"<answer>2{spaces} + 3</answer>", 5, [3, 2]) == 0.0
    assert score("<answer>3 - 2</answer>", 1, [2, 3]) == 1.0 and score("<answer>2 - 3</answer>", 1, [2, 3]) == 0.0
    assert score("<answer>2 + 2</answer>", 4, [2]) == 0.0 and score("<answer>4</answer>", 4, [4, 1]) == 0.0
    assert score("<answer>5 / (2 - 2)</answer>", 0, [5, 2, 2]) == 0.0
