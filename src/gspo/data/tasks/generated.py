"""Rows from families of generated problems in three levels of difficulty."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from gspo.data.rows import Row, user_message
from gspo.data.tasks.splits import is_held_out, num_rows
from gspo.seeding import derive_seed

LEVELS = (1, 2, 3)
INSTRUCTION = "Think step by step and put the final answer in \\boxed{}."


@dataclass(frozen=True, slots=True)
class Problem:
    """A question, its answer as it belongs in the box, and the solution worked out."""

    question: str
    answer: str
    solution: str


Family = Callable[[random.Random, int], Problem]
"""Makes a problem of difficulty 1, 2 or 3 from a random generator."""


def generate_rows(
    source: str, families: Mapping[str, Family], split: str, *, limit: int | None, seed: int
) -> list[Row]:
    """`limit` distinct problems, all families and levels in turn; the same for the same seed."""
    problems = itertools.islice(_problems(source, families, split, seed), num_rows(split, limit))
    return [
        Row(
            uid=f"{source}/{split}/{index}",
            messages=user_message(f"{problem.question}\n{INSTRUCTION}"),
            data_source=source,
            ground_truth=problem.answer,
            answer=f"{problem.solution}\n\\boxed{{{problem.answer}}}",
            extra={"family": name, "level": level},
        )
        for index, (problem, name, level) in enumerate(problems)
    ]


def _problems(source: str, families: Mapping[str, Family], split: str, seed: int) -> Iterator[tuple[Problem, str, int]]:
    """Distinct problems of the split without end, each with its family and level."""
    seen: set[str] = set()
    for draw, (level, name) in enumerate(itertools.cycle(itertools.product(LEVELS, families))):
        problem = families[name](random.Random(derive_seed(seed, f"{source}/{split}", draw)), level)
        if problem.question not in seen and is_held_out(problem.question) == (split == "val"):
            seen.add(problem.question)
            yield problem, name, level
