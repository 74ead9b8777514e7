"""`guess`: find a number from 1 to 64 in six guesses, told `higher` or `lower` after each (environment.name=guess)."""

from __future__ import annotations

from typing import Literal

from gspo.data.rows import DataError, Row, user_message
from gspo.data.tasks.splits import num_rows
from gspo.seeding import derive_seed

HIGH = 64


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
