"""Numbers in words: durations, counts, shares, as a person would write them."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

_PLACE = re.compile(r"((?:[\w.@+-]+[=:])*)(~?/(?!/).*)", re.DOTALL)


def duration(seconds: float) -> str:
    """`8.4 s`, `1 min 12 s`, `3 h 05 min`, `2 d 4 h`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = whole // 60
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02d} min"
    return f"{minutes // 1440} d {minutes % 1440 // 60} h"


def count(value: float) -> str:
    """`950`, `12,400`, `3.4 million`, `1.2 billion`."""
    if value < 1e6:
        return f"{value:,.0f}"
    return f"{value / 1e6:.3g} million" if value < 1e9 else f"{value / 1e9:.3g} billion"


def percent(share: float, digits: int = 1) -> str:
    """`86.5 %`."""
    return f"{100 * share:.{digits}f} %"


def points(difference: float) -> str:
    """`+45.3 points`."""
    return f"{100 * difference:+.1f} points"


def interval(low: float, high: float) -> str:
    """`83.0 to 89.4 %`."""
    return f"{100 * low:.1f} to {100 * high:.1f} %"


def name_of(value: object) -> str:
    """A config value as text: lists are joined, None is `none`, a path is its last part."""
    if isinstance(value, list):
        return ", ".join(str(portable(v)) for v in value)
    return "none" if value is None else str(portable(value))


def portable(value: Any) -> Any:
    """A value without the folders of this machine: `/home/me/a.jsonl` becomes `…/a.jsonl`, also after `key=`."""
    if isinstance(value, list):
        return [portable(v) for v in value]
    if isinstance(value, dict):
        return {k: portable(v) for k, v in value.items()}
    if not isinstance(value, str):
        return value
    return "".join(_without_folder(part) for part in re.split(r"([,\[\]\"'])", value))


def _without_folder(text: str) -> str:
    match = _PLACE.fullmatch(text)
    return f"{match[1]}…/{PurePosixPath(match[2]).name}" if match else text
