"""A held-out part of rows that have none: a share of the questions, chosen by their text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

from gspo.data.rows import DataError, Row


def split_rows(rows: Sequence[Row], share: float) -> tuple[list[Row], list[Row]]:
    """Training rows and held-out rows: `share` of the different questions, at least one, whatever the seed.

    Rows with the same question are on the same side, so no held-out question is trained on.
    """
    questions = {row.uid: _digest(row) for row in rows}
    ordered = sorted(set(questions.values()))
    if len(ordered) < 2:
        raise DataError(f"data.val_split={share:g}", "needs at least two different questions to hold one of them out")
    held_out = set(ordered[: max(1, round(share * len(ordered)))])
    return (
        [row for row in rows if questions[row.uid] not in held_out],
        [row for row in rows if questions[row.uid] in held_out],
    )


def _digest(row: Row) -> str:
    """A hash of the question's text. A system prompt, which may be added by a key, does not count."""
    texts = [(m["role"], m["content"]) for m in row.messages if m["role"] != "system"]
    return hashlib.blake2b(json.dumps(texts).encode(), digest_size=8).hexdigest()
