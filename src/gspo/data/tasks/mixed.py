"""`mixed`: math, reasoning and code in one dataset; each row's data_source selects its reward."""

from __future__ import annotations

import itertools

from gspo.data.rows import Row
from gspo.data.tasks.code import load_code
from gspo.data.tasks.math import load_math
from gspo.data.tasks.reasoning import load_reasoning

NUM_TRAIN = 4096
NUM_HELD_OUT = 256


def load_mixed(split: str = "train", *, limit: int | None = None, seed: int = 0) -> list[Row]:
    """The three in turn, one row of each at a time; code, of which there is least, is used up first."""
    if limit is None:
        limit = NUM_TRAIN if split == "train" else NUM_HELD_OUT
    parts = (load(split, limit=limit, seed=seed) for load in (load_math, load_reasoning, load_code))
    turns = itertools.zip_longest(*parts)
    rows = (row for turn in turns for row in turn if row is not None)
    return list(itertools.islice(rows, limit))
