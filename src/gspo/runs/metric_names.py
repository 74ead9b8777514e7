"""Names of held-out metrics, and what a row of metrics says about held-out questions.

`val-core/{source}/{acc|reward}/{mean|best|maj}@{k}` and `val-aux/{source}/{measure}`. A data source may hold slashes
(`openai/gsm8k`), so names are read from their end. The pages of a report follow the same rule (`static/core.js`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

CORE, AUX = "val-core/", "val-aux/"
_MEAN = rf"{CORE}(.+)/{{kind}}/mean@\d+"
ACCURACY = _MEAN.format(kind="acc")
MISSING_SHARE = "reward_failures/share"  # of the rewards of a data source; only in rows where some are missing
LONE_MEASURES = ("reward_failures",)  # the others have two parts, as in `acc/ci_low`


class HeldOut(NamedTuple):
    """A held-out metric: its data source and what was measured, such as `acc/mean@4`."""

    source: str
    measure: str


def core_name(source: str, measure: str) -> str:
    """The name of a main figure of a data source; `measure` is such as `acc/mean@4`."""
    return f"{CORE}{source}/{measure}"


def aux_name(source: str, measure: str) -> str:
    """The name of a further figure of a data source; `measure` is such as `acc/ci_low`."""
    return f"{AUX}{source}/{measure}"


def held_out(name: str) -> HeldOut | None:
    """The data source and measure of a held-out metric; None for another metric."""
    if not name.startswith((CORE, AUX)):
        return None
    path = name.partition("/")[2]
    num_parts = 1 if path.endswith(tuple(f"/{m}" for m in LONE_MEASURES)) else 2
    source, *measure = path.rsplit("/", num_parts)
    return HeldOut(source, "/".join(measure)) if len(measure) == num_parts else None


def held_out_source(name: str) -> str | None:
    """The data source of a held-out metric, None for another metric."""
    found = held_out(name)
    return None if found is None else found.source


def is_accuracy(name: str) -> bool:
    """Whether a metric is the held-out accuracy of a data source."""
    return re.fullmatch(ACCURACY, name) is not None


def held_out_accuracy(row: Mapping[str, Any]) -> float | None:
    """Mean held-out accuracy over the data sources of a row, None when it has none."""
    return _mean_over_sources(row, "acc")


def held_out_score(row: Mapping[str, Any]) -> float | None:
    """Mean held-out accuracy over the data sources of a row; the reward where no accuracy is known."""
    accuracy = held_out_accuracy(row)
    return _mean_over_sources(row, "reward") if accuracy is None else accuracy


def accuracy_interval(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """The interval of the held-out accuracy of a row with one data source; None with several."""
    sources = [s for name in row if (s := held_out_source(name)) and name == aux_name(s, "acc/ci_low")]
    if len(sources) != 1:
        return None
    low, high = (row.get(aux_name(sources[0], f"acc/{end}")) for end in ("ci_low", "ci_high"))
    return (low, high) if _is_number(low) and _is_number(high) else None


def incomplete_sources(row: Mapping[str, Any]) -> set[str]:
    """The data sources with fewer than half of their held-out rewards: their figures say little about the model."""
    shares = {h.source: v for name, v in row.items() if (h := held_out(name)) and h.measure == MISSING_SHARE}
    return {source for source, share in shares.items() if _is_number(share) and share > 0.5}


def tool_call_share(row: Mapping[str, Any]) -> float | None:
    """The share of held-out responses that call a tool, over the data sources of a row; None without an environment."""
    values = [
        v for name, v in row.items() if (h := held_out(name)) and h.measure == "tool_calls/share" and _is_number(v)
    ]
    return sum(values) / len(values) if values else None


def _mean_over_sources(row: Mapping[str, Any], kind: str) -> float | None:
    pattern = re.compile(_MEAN.format(kind=kind))
    values = [value for name, value in row.items() if pattern.fullmatch(name) and _is_number(value)]
    return sum(values) / len(values) if values else None


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
