"""Rows from families of generated problems, graded in difficulty, with train and held-out questions that cannot meet."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gspo.data.rows import Row, user_message
from gspo.seeding import derive_seed

LEVELS = (1, 2, 3)
NUM_TRAIN = 8192
NUM_HELD_OUT = 512
INSTRUCTION = "Think step by step and put the final answer in \\boxed{}."
_HELD_OUT_SHARE = 16


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its answer as it should stand in the box, and a worked-out way there."""

    question: str
    answer: str
    solution: str


Family = Callable[[random.Random, int], Problem]
"""Makes a problem of difficulty 1, 2 or 3 from a random generator."""


def is_held_out(question: str) -> bool:
    """Whether a question belongs to the held-out set: a property of its text."""
    digest = hashlib.blake2b(question.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % _HELD_OUT_SHARE == 0


def generate_rows(
    source: str, families: Mapping[str, Family], split: str, *, limit: int | None, seed: int
) -> list[Row]:
    """`limit` distinct problems, going round the families and levels; the same for the same seed."""
    if limit is None:
        limit = NUM_TRAIN if split == "train" else NUM_HELD_OUT
    kinds = list(itertools.product(LEVELS, families))
    rows: list[Row] = []
    seen: set[str] = set()
    for draw in itertools.count():
        if len(rows) >= limit:
            return rows
        level, name = kinds[draw % len(kinds)]
        problem = families[name](random.Random(derive_seed(seed, f"{source}/{split}", draw)), level)
        if problem.question in seen or is_held_out(problem.question) != (split == "val"):
            continue
        seen.add(problem.question)
        rows.append(
            Row(
                uid=f"{source}/{split}/{len(rows)}",
                messages=user_message(f"{problem.question}\n{INSTRUCTION}"),
                data_source=source,
                ground_truth=problem.answer,
                answer=f"{problem.solution}\n\\boxed{{{problem.answer}}}",
                extra={"family": name, "level": level},
            )
        )
    raise AssertionError("unreachable")
