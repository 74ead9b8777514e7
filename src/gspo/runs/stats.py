"""The difference of two accuracies over the same questions, with its interval (Bonett and Price)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

Z95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class PairedDifference:
    """Mean of b - a over the questions both answered, with its 95 % interval and the counts behind it."""

    difference: float
    low: float
    high: float
    num_questions: int
    num_better: int
    num_worse: int
    mean_a: float
    mean_b: float

    @property
    def clear(self) -> bool:
        """Whether the interval leaves out zero."""
        return self.low > 0 or self.high < 0

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "clear": self.clear}


def paired_difference(a: Sequence[float], b: Sequence[float], z: float = Z95) -> PairedDifference | None:
    """The mean of b - a with an adjusted Wald interval (Bonett and Price, 2012, J. Educ. Behav. Stat. 37(4)).

    One question won and one lost are added, so that runs that agree on every question still get an interval of
    honest width. For right/wrong answers this is the published interval; values may also be shares of right answers.
    """
    if len(a) != len(b):
        raise ValueError(f"paired_difference: {len(a)} and {len(b)} values; each question needs one of both")
    if not a:
        return None
    deltas = [y - x for x, y in zip(a, b)]
    n = len(deltas)
    centre = math.fsum(deltas) / (n + 2)
    variance = (math.fsum(d * d for d in deltas) + 2) / (n + 2) - centre * centre
    half = z * math.sqrt(max(0.0, variance) / (n + 2))
    return PairedDifference(
        difference=math.fsum(deltas) / n,
        low=max(-1.0, centre - half),
        high=min(1.0, centre + half),
        num_questions=n,
        num_better=sum(d > 0 for d in deltas),
        num_worse=sum(d < 0 for d in deltas),
        mean_a=math.fsum(a) / n,
        mean_b=math.fsum(b) / n,
    )


def question_scores(records: Sequence[Mapping[str, Any]]) -> dict[str, tuple[float, str]]:
    """uid → (mean accuracy of its responses, question and answer). Rewards of another scale are left out."""
    out: dict[str, tuple[float, str]] = {}
    for record in records:
        responses = [r for r in record["responses"] if isinstance(r, Mapping)]
        share = share_right(responses)
        if share is not None:
            asked = f"{record.get('messages')!r} {record.get('ground_truth')!r}"
            out[str(record.get("uid"))] = (share, asked)
    return out


def correctness(response: Mapping[str, Any]) -> float | None:
    """How right a response is, from 0 to 1: its accuracy, else a score of 0 or 1; None for a reward of another scale."""
    acc, score = response.get("acc"), response.get("score")
    if isinstance(acc, int | float):
        return float(acc) if 0 <= acc <= 1 else None
    return float(score) if isinstance(score, int | float) and score in (0, 1) else None


def share_right(responses: Sequence[Mapping[str, Any]]) -> float | None:
    """The mean correctness of the responses that have a reward; None where one of them is of another scale, or none has."""
    scored = [r for r in responses if isinstance(r.get("acc"), int | float) or isinstance(r.get("score"), int | float)]
    values = [v for r in scored if (v := correctness(r)) is not None]
    return sum(values) / len(values) if values and len(values) == len(scored) else None


def paired_by_question(
    a: Mapping[str, tuple[float, str]], b: Mapping[str, tuple[float, str]]
) -> tuple[PairedDifference | None, int]:
    """The difference over questions that both hold under the same uid with the same text, and how many were left out."""
    common = [uid for uid in a if uid in b and a[uid][1] == b[uid][1]]
    left_out = len(a.keys() | b.keys()) - len(common)
    return paired_difference([a[u][0] for u in common], [b[u][0] for u in common]), left_out
