"""Which questions of a built-in task are held out, and how many rows a split has by default."""

from __future__ import annotations

import hashlib

NUM_TRAIN, NUM_HELD_OUT = 8192, 512


def is_held_out(text: str, one_in: int = 16) -> bool:
    """Whether a question belongs to the held-out set: a property of its text, so the two sets cannot overlap."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % one_in == 0


def num_rows(split: str, limit: int | None, num_train: int = NUM_TRAIN, num_held_out: int = NUM_HELD_OUT) -> int:
    """The rows of a split: `limit`, or by default `num_train` or `num_held_out`."""
    if limit is not None:
        return limit
    return num_train if split == "train" else num_held_out
