"""Readers of a run folder's files, which may come from anyone (`gspo.untrusted`).

What is missing or half written is left out. A file over a limit, of another kind or damaged is Unreadable; `read_run`
records it as a problem of the run.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo import untrusted
from gspo.untrusted import Unreadable

_STEP_FILE = re.compile(r"step-(\d{1,12})\.jsonl\.gz$")
_NUMBERS = re.compile(r'((?:log_probs|token_ids|loss_mask)": ?\[)[^\]]+')
# Two patterns: each is searched by its first character, an alternation is tried at every place of the text.
_HUGE_EXPONENT = re.compile(r"[eE]\+?\d{3}")
_HUGE_INTEGER = re.compile(r"\d{300}")
_TWO_DIGITS = re.compile(r"\d\d")
MAX_ALARMS = 10_000
MAX_PROBLEMS = 5  # of one file that are named


def parse_json(text: str, path: Path) -> Any:
    """The value of JSON text; NaN, infinities and numbers beyond a float's range, which no browser reads, become null."""
    if _may_have_huge(text):
        return untrusted.parse_json(
            text, path, parse_constant=_no_number, parse_float=_finite, parse_int=_finite_integer
        )
    return untrusted.parse_json(text, path, parse_constant=_no_number)


def _may_have_huge(text: str) -> bool:
    """Whether text may have a number beyond a float's range, which Python reads as an infinity or as an integer."""
    if _HUGE_EXPONENT.search(text):
        return True
    # 300 digits in a row include two neighbours of every 150th character.
    return bool(_TWO_DIGITS.search(text[::150]) and _HUGE_INTEGER.search(text))


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


def parse_line(line: bytes, path: Path) -> dict[str, Any] | None:
    """The object of one JSON line; None when it does not parse or is something else."""
    if not line.strip():
        return None
    try:
        value = parse_json(line.decode("utf-8", "replace"), path)
    except Unreadable:
        return None
    return value if isinstance(value, dict) else None


def read_lines(path: Path, limit: int) -> list[dict[str, Any]]:
    """The last `limit` objects of a small JSON-lines file; a line that does not parse is skipped, a missing file is []."""
    try:
        lines = untrusted.read_bytes(path).split(b"\n")
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [value for line in lines[-limit - 1 :] if (value := parse_line(line, path)) is not None]


def read_object(path: Path) -> dict[str, Any] | None:
    """The file's JSON object, or None when there is no file."""
    try:
        value = parse_json(untrusted.read_text(path), path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not isinstance(value, dict):
        raise Unreadable(path, f"expected a JSON object, found a {type(value).__name__}")
    return value


def read_groups(path: Path, *, numbers: bool = True, problems: list[str] | None = None) -> list[dict[str, Any]]:
    """The records of one `step-NNNNNN.jsonl.gz` as far as it can be read; what is left out is added to `problems`.

    Without `numbers` the lists with a number per token are empty. Those lists are most of a file. Emptying them in the
    text is exact: they hold numbers only, and inside a JSON string the quote before the colon would be escaped.
    """
    out: list[dict[str, Any]] = []
    found: list[str] = []
    try:
        for number, line in enumerate(untrusted.gzip_lines(path), 1):
            text = line.decode("utf-8", "replace")
            try:
                record = parse_json(text if numbers else _NUMBERS.sub(r"\1", text), path)
            except Unreadable as error:
                found.append(f"line {number} {error.reason}")
                continue
            if isinstance(record, dict) and isinstance(record.get("responses"), list):
                out.append(record)
            else:
                found.append(f"line {number} is not a group")
    except Unreadable as error:
        found = [error.reason, *found]
    except OSError as error:
        found = [f"cannot be read ({error.strerror})"]
    if problems is not None:
        problems += found[:MAX_PROBLEMS]
    return out


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
    refused: Unreadable | None = None
    for read in (_read_settings, _read_values):
        try:
            records = [
                {"key": key, "value": value, "origin": origin}
                for prefix, tree, origin in read(folder)
                for key, value in _leaves(tree, prefix)
            ]
        except Unreadable as error:
            refused = refused or error
        except (OSError, TypeError, KeyError):
            pass
        else:
            if records:
                return records
    if refused is not None:
        raise refused
    return []


def _read_settings(folder: Path) -> list[tuple[str, Any, str]]:
    path = folder / "config.json"
    records = parse_json(untrusted.read_text(path), path)
    return [(str(record["key"]), record["value"], str(record["origin"])) for record in records]


def _read_values(folder: Path) -> list[tuple[str, Any, str]]:
    tree = untrusted.read_yaml(folder / "config.yaml")
    return [("", tree, "")] if isinstance(tree, dict) else []


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    """Dotted keys and values below a key; an empty mapping is a value."""
    if isinstance(value, dict) and (value or not key):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value if not isinstance(value, float) or math.isfinite(value) else str(value)
