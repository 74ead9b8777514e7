"""Tolerant readers of a run folder's files: what is missing, half written or malformed is left out, never an error."""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_STEP_FILE = re.compile(r"step-(\d+)\.jsonl\.gz$")
_NUMBERS = re.compile(r'(log_probs|token_ids|loss_mask)": \[[^\]]*')
# Matches every number beyond a float's range, which Python reads as an infinity.
_HUGE = re.compile(r"[eE]\+?\d{3}|\d{300}")


def parse_json(text: str) -> Any:
    """The value of JSON text; NaN, infinities and numbers beyond a float's range, which no browser reads, become null."""
    if _HUGE.search(text):
        return json.loads(text, parse_constant=_no_number, parse_float=_finite, parse_int=_finite_integer)
    return json.loads(text, parse_constant=_no_number)


def to_json(value: Any) -> str:
    """The value as compact JSON that a browser reads: NaN and infinities become null, other objects their text."""
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:
        return to_json(_without_nan(value))


def _without_nan(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    return [_without_nan(v) for v in value] if isinstance(value, list | tuple) else value


def _no_number(name: str) -> None:
    pass


def _finite(text: str) -> float | None:
    value = float(text)
    return value if math.isfinite(value) else None


def _finite_integer(text: str) -> int | None:
    return int(text) if math.isfinite(float(text)) else None


def json_lines(text: str) -> list[dict[str, Any]]:
    """The objects of JSON lines; a line that does not parse is skipped."""
    out = []
    for line in text.split("\n"):  # not splitlines: model text may hold other line separators
        if not line.strip():
            continue
        try:
            value = parse_json(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            out.append(value)
    return out


def read_text(path: Path) -> str:
    """The file's text, or "" when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def read_json(path: Path) -> dict[str, Any] | None:
    """The file's JSON object, or None when it has no complete one."""
    try:
        value = parse_json(read_text(path))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Metric rows by step; rows of one step are merged, the later value wins."""
    by_step: dict[int, dict[str, Any]] = {}
    for row in json_lines(read_text(path)):
        step = row.get("step")
        if isinstance(step, int) and not isinstance(step, bool):
            by_step.setdefault(step, {}).update(row)
    return [by_step[step] for step in sorted(by_step)]


def read_gzip(path: Path) -> str:
    """The text of a gzip file as far as it can be decompressed; "" when it cannot be read."""
    try:
        data = path.read_bytes()
    except OSError:
        return ""
    try:
        return gzip.decompress(data).decode("utf-8", "replace")
    except (OSError, EOFError, zlib.error):
        pass
    try:
        return zlib.decompressobj(wbits=31).decompress(data).decode("utf-8", "replace")
    except zlib.error:
        return ""


def read_groups(path: Path, *, numbers: bool = True) -> list[dict[str, Any]]:
    """The records of one `step-NNNNNN.jsonl.gz`; without `numbers` the lists with a number per token are empty.

    Those lists are most of a file. Emptying them in the text is exact: they hold numbers only, and inside a JSON
    string the quote before the colon would be escaped.
    """
    text = read_gzip(path)
    if not numbers:
        text = _NUMBERS.sub(r'\1": [', text)
    return [g for g in json_lines(text) if isinstance(g.get("responses"), list)]


def step_files(folder: Path) -> dict[int, Path]:
    """Step number → file, for the `step-NNNNNN.jsonl.gz` of a folder, ascending. Symlinks are left out."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if not entry.is_symlink()]
    except OSError:
        return {}
    found = {int(m.group(1)): folder / name for name in names if (m := _STEP_FILE.match(name))}
    return dict(sorted(found.items()))


def read_config(folder: Path) -> list[dict[str, Any]]:
    """The settings of a run in order, as `{"key", "value", "origin"}`; a mapping gives one record per entry.

    They come from config.json. A folder without a usable one gives the values of config.yaml, with empty origins.
    """
    for read in (_read_settings, _read_values):
        try:
            records = [
                {"key": key, "value": value, "origin": origin}
                for prefix, tree, origin in read(folder)
                for key, value in _leaves(tree, prefix)
            ]
        except (ValueError, TypeError, KeyError, RecursionError, yaml.YAMLError):
            continue
        if records:
            return records
    return []


def _read_settings(folder: Path) -> list[tuple[str, Any, str]]:
    records = parse_json(read_text(folder / "config.json"))
    return [(str(record["key"]), record["value"], str(record["origin"])) for record in records]


def _read_values(folder: Path) -> list[tuple[str, Any, str]]:
    tree = yaml.load(read_text(folder / "config.yaml"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return [("", tree, "")] if isinstance(tree, dict) else []


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values below a key; an empty mapping is a value."""
    if isinstance(value, dict) and (value or not key):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if not isinstance(value, float) or math.isfinite(value) else str(value)
