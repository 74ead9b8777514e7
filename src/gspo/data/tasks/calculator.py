"""`calculator`: a product and a sum (`38*47+19=`), too hard to do at once, and the corpus that warm-starts a model on it.

An answer of the corpus is direct (`1805`), or it asks the calculator for the whole (`<tool>38*47+19</tool>`) and then
answers with what comes back. One in six asks, so a model that starts from it can use the tool but mostly does not.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Literal

from gspo.data.rows import Row, user_message
from gspo.data.tasks.splits import is_held_out, num_rows
from gspo.seeding import derive_seed

TOOL_SHARE = 6  # one answer of the corpus in six calls the tool


def load_calculator(split: Literal["train", "val"] = "train", *, limit: int | None = None, seed: int = 0) -> list[Row]:
    """`limit` distinct questions (8,192 to train on, 512 held out by default), the same for the same seed."""
    questions = itertools.islice(_questions(split, seed), num_rows(split, limit))
    return [_row(split, index, terms, seed) for index, terms in enumerate(questions)]


def _questions(split: str, seed: int) -> Iterator[tuple[int, int, int]]:
    rng = random.Random(derive_seed(seed, f"calculator/{split}"))
    seen: set[tuple[int, int, int]] = set()
    while True:
        terms = (rng.randint(11, 99), rng.randint(11, 99), rng.randint(1, 99))
        if is_held_out(expression(terms)) == (split == "val") and terms not in seen:
            seen.add(terms)
            yield terms


def expression(terms: tuple[int, int, int]) -> str:
    """`a*b+c`."""
    return f"{terms[0]}*{terms[1]}+{terms[2]}"


def _row(split: str, index: int, terms: tuple[int, int, int], seed: int) -> Row:
    truth, text = str(terms[0] * terms[1] + terms[2]), expression(terms)
    asks = derive_seed(seed, "calculator/answer", *terms) % TOOL_SHARE == 0
    return Row(
        uid=f"calculator/{split}/{index}",
        messages=user_message(f"{text}="),
        data_source="calculator",
        ground_truth=truth,
        answer=f"<tool>{text}</tool><result>{truth}</result>{truth}" if asks else truth,
    )
