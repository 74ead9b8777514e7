"""`arithmetic`: sums of three or four numbers below 100, and the corpus that warm-starts a model on them.

`23+45+7=` may be answered directly (`75`) or worked out (`23+45=68;68+7=75;75`). One answer of the corpus in three is
worked out, so a model that starts from it can reason but mostly answers at once.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Literal

from gspo.data.rows import DataError, Row, user_message
from gspo.data.tasks.splits import is_held_out, num_rows
from gspo.seeding import derive_seed

MAX_QUESTIONS = 1_000_000  # of some 9 × 10^7: drawing without repeats stays quick
_SLIPS = (-10, -3, -2, -1, 1, 2, 3, 10)
_CHOSEN_WORKED_OUT, _REJECTED_WORKED_OUT = 0.75, 0.5  # shares of the answers of a preference pair
_WORKED_OUT_SHARE = 3  # one answer of the corpus in three is worked out


def work_out(terms: list[int]) -> str:
    """The sum done one addition at a time, with the answer last: `23+45=68;68+7=75;75`."""
    totals = list(itertools.accumulate(terms))
    steps = [f"{left}+{term}={total}" for left, term, total in zip(totals, terms[1:], totals[1:])]
    return ";".join([*steps, str(totals[-1])])


def final_answer(text: str) -> str:
    """The final answer of a response: the text after its last `;`, or all of it, stripped."""
    return text.rsplit(";", 1)[-1].strip()


def score(text: str, truth: str | int) -> float:
    """1.0 when the final answer is exactly the integer `truth` in plain digits, else 0.0."""
    return 1.0 if final_answer(text) == str(truth) else 0.0


def preference(question: str, draw: int) -> tuple[str, str]:
    """A right and a wrong answer, each worked out or direct, so that the form does not tell which one is right."""
    terms, rng = [int(term) for term in question.rstrip("=").split("+")], random.Random(draw)
    right = work_out(terms) if rng.random() < _CHOSEN_WORKED_OUT else str(sum(terms))
    wrong = _work_out_wrong(terms, rng) if rng.random() < _REJECTED_WORKED_OUT else str(_slip(sum(terms), rng))
    return right, wrong


def _work_out_wrong(terms: list[int], rng: random.Random) -> str:
    """The sum worked out with a slip in one addition, and gone on from there."""
    place = rng.randrange(1, len(terms))
    total, steps = terms[0], []
    for number, term in enumerate(terms[1:], 1):
        found = _slip(total + term, rng) if number == place else total + term
        steps.append(f"{total}+{term}={found}")
        total = found
    return ";".join([*steps, str(total)])


def _slip(total: int, rng: random.Random) -> int:
    """A number close to `total`, or off by one in a higher digit, as a model's wrong sums are."""
    return rng.choice([found for slip in _SLIPS if (found := total + slip) > 0])


def load_arithmetic(split: Literal["train", "val"] = "train", *, limit: int | None = None, seed: int = 0) -> list[Row]:
    """`limit` distinct questions (8,192 to train on, 512 held out by default), the same for the same seed.

    `answer` is worked out for one row in three and direct for the others.
    """
    limit = num_rows(split, limit)
    if limit > MAX_QUESTIONS:
        raise DataError("arithmetic", f"cannot make {limit} questions; expected at most {MAX_QUESTIONS}")
    questions = _questions(split, seed)
    return [_row(split, index, terms, seed) for index, terms in enumerate(itertools.islice(questions, limit))]


def _questions(split: str, seed: int) -> Iterator[list[int]]:
    rng = random.Random(derive_seed(seed, f"arithmetic/{split}"))
    seen: set[tuple[int, ...]] = set()
    while True:
        terms = [int(rng.random() * 99) + 1 for _ in range(3 + int(rng.random() * 2))]
        if is_held_out(_question(terms)) == (split == "val") and tuple(terms) not in seen:
            seen.add(tuple(terms))
            yield terms


def _question(terms: list[int]) -> str:
    return "+".join(map(str, terms)) + "="


def _row(split: str, index: int, terms: list[int], seed: int) -> Row:
    truth = str(sum(terms))
    worked_out = derive_seed(seed, "arithmetic/answer", *terms) % _WORKED_OUT_SHARE == 0
    return Row(
        uid=f"arithmetic/{split}/{index}",
        messages=user_message(_question(terms)),
        data_source="arithmetic",
        ground_truth=truth,
        answer=work_out(terms) if worked_out else truth,
        extra={"num_terms": len(terms)},
    )
