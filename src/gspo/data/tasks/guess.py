"""`guess`: find a number from 1 to 64 in six guesses, each answered `higher` or `lower` (environment.name=guess).

`play` makes the games that warm-start a model: one guess in three halves the numbers that are left, the others move on
by one or two. A model that starts from them can bisect but mostly does not.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any, Literal

from gspo.data.rows import DataError, Row, user_message
from gspo.data.tasks.splits import num_rows
from gspo.seeding import derive_seed

HIGH, NUM_GUESSES = 64, 6
BISECT_SHARE = 3  # one guess of the games in three halves what is left


def load_guess(split: Literal["train", "val"] = "train", *, limit: int | None = None, seed: int = 0) -> list[Row]:
    """`limit` rounds (8,192 to train on, 512 held out by default), each with its number; the same for the same seed."""
    size = num_rows(split, limit)
    if size < 1:
        raise DataError("guess", f"cannot make {size} rounds; expected at least 1")
    return [
        Row(
            uid=f"guess/{split}/{index}",
            messages=user_message(f"1-{HIGH}?"),
            data_source="guess",
            ground_truth=1 + derive_seed(seed, f"guess/{split}", index) % HIGH,
        )
        for index in range(size)
    ]


def play(number: int, rng: random.Random) -> list[Mapping[str, Any]]:
    """The messages of a game after its question: guesses and answers, until the number is found or guesses run out."""
    low, high, last = 1, HIGH, rng.randint(1, HIGH)
    messages: list[Mapping[str, Any]] = []
    for turn in range(NUM_GUESSES):
        guess = (low + high) // 2 if rng.randrange(BISECT_SHARE) == 0 else max(low, min(high, last))
        messages.append({"role": "assistant", "content": str(guess)})
        if guess == number or turn + 1 == NUM_GUESSES:
            break
        step = rng.randint(1, 2)
        if guess < number:
            low, last, hint = guess + 1, guess + step, "higher"
        else:
            high, last, hint = guess - 1, guess - step, "lower"
        messages.append({"role": "user", "content": hint})
    return messages
