"""`code`: programming problems of our own with tests, shipped in the package, graded easy, medium and hard."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from gspo.data.rows import Row, user_message
from gspo.data.tasks.splits import is_held_out
from gspo.seeding import derive_seed

LEVELS = ("easy", "medium", "hard")
INSTRUCTION = "Answer with one Python program in a ```python block."
_FILE = Path(__file__).parents[1] / "problems" / "code.jsonl"
_HELD_OUT_ONE_IN = 6


def read_problems() -> list[dict[str, Any]]:
    """The shipped problems: id, level, style (stdin or function), statement, tests, solution."""
    return [json.loads(line) for line in _FILE.read_text(encoding="utf-8").splitlines()]


def load_code(split: str = "train", *, limit: int | None = None, seed: int = 0) -> list[Row]:
    """The problems of a split, easy ones first, shuffled by `seed` within a level.

    `ground_truth` holds the tests in the form that `gspo.rewards.grade_code` reads.
    """
    problems = [p for p in read_problems() if is_held_out(p["id"], _HELD_OUT_ONE_IN) == (split == "val")]
    random.Random(derive_seed(seed, "code")).shuffle(problems)
    problems.sort(key=lambda p: LEVELS.index(p["level"]))
    return [_row(p, split) for p in problems[:limit]]


def _row(problem: dict[str, Any], split: str) -> Row:
    return Row(
        uid=f"code/{split}/{problem['id']}",
        messages=user_message(f"{problem['statement']}\n{INSTRUCTION}"),
        data_source="code",
        ground_truth=problem["tests"],
        answer=f"```python\n{problem['solution'].rstrip()}\n```",
        extra={"level": problem["level"], "style": problem["style"]},
    )
