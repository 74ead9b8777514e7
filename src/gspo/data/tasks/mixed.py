"""`mixed`: math, reasoning and code in one dataset; each row's data_source selects its reward."""

from __future__ import annotations

import itertools

from gspo.data.rows import Row
from gspo.data.tasks.code import load_code
from gspo.data.tasks.math import load_math
from gspo.data.tasks.reasoning import load_reasoning
from gspo.data.tasks.splits import num_rows


def load_mixed(split: str = "train", *, limit: int | None = None, seed: int = 0) -> list[Row]:
    """One row of each task in turn, 4,096 to train on and 256 held out by default. Code has the fewest and ends first."""
    limit = num_rows(split, limit, 4096, 256)
    parts = (load(split, limit=limit, seed=seed) for load in (load_math, load_reasoning, load_code))
    turns = itertools.zip_longest(*parts)
    rows = (row for turn in turns for row in turn if row is not None)
    return list(itertools.islice(rows, limit))
