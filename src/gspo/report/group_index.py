"""The group index: a short line for every group of a run, so that a page can list, filter and chart them all.

The texts stay in `groups/` and `evals/`, one file per step, and are read when a group is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gspo.runs.stats import correctness

HELD_OUT = "held_out"
FIELDS = ("uid", "fate", "source", "n", "rate", "score", "tokens", "question", "truth", "version")
QUESTION_CHARS = 160
TRUTH_CHARS = 48


def index_step(records: Sequence[Mapping[str, Any]], held_out: bool = False) -> dict[str, Any]:
    """`groups`: a list in the order of FIELDS for each record; `ratios`: ratio - 1 of every trained response."""
    ratios: list[float] = []
    return {"groups": [_line(r, held_out, ratios) for r in records], "ratios": ratios}


def _line(record: Mapping[str, Any], held_out: bool, ratios: list[float]) -> list[Any]:
    responses = [r for r in record["responses"] if isinstance(r, dict)]
    right = [v for r in responses if (v := correctness(r)) is not None]
    scores = [float(r["score"]) for r in responses if isinstance(r.get("score"), int | float)]
    trained = [float(r["ratio"]) - 1.0 for r in responses if isinstance(r.get("ratio"), int | float)]
    ratios += [round(v, 8) for v in trained]
    truth = record.get("ground_truth")
    facts = {
        "uid": str(record.get("uid", "")),
        "fate": HELD_OUT if held_out else str(record.get("fate", "")),
        "source": str(record.get("data_source", "")),
        "n": len(responses),
        "rate": round(sum(right) / len(right), 4) if right else None,
        "score": round(sum(scores) / len(scores), 4) if scores else None,
        "tokens": sum(int(n) for r in responses if isinstance(n := r.get("num_tokens"), int | float)),
        "question": _question(record.get("messages"))[:QUESTION_CHARS],
        "truth": "" if truth is None else str(truth)[:TRUTH_CHARS],
        "version": record.get("version"),
    }
    return [facts[name] for name in FIELDS]


def _question(messages: Any) -> str:
    """The last message a user wrote, on one line."""
    if not isinstance(messages, list):
        return ""
    written = [m for m in messages if isinstance(m, dict)]
    users = [m for m in written if m.get("role") == "user"] or written
    content = users[-1].get("content", "") if users else ""
    if isinstance(content, list):
        content = " ".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return " ".join(str(content).split())
