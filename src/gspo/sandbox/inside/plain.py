"""Plain data between processes: exact built-in types as tagged JSON, so that nothing but data is exchanged.

Scalars are written as they are; a container is a list whose first item is its tag: `l` list, `t` tuple, `s` set,
`f` frozenset, `d` dictionary (pairs), `b` bytes, `i` large integer, `c` complex, `r` an object that stayed in the other
process, `k` a function of the other process that may be called.
"""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

MAX_BYTES = 2 << 20
MAX_DEPTH = 100
_SMALL = 1 << 63
_MAX_COLLISIONS = 100

_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "f"}
_MAPPINGS = (dict, defaultdict, OrderedDict, Counter)


class NotPlain(ValueError):
    """The value, or the bytes, are not plain data within the limits."""


def encode(value: Any, reference: Callable[[Any], list] | None = None) -> Any:
    """The tagged form of `value`, ready for json.dumps; values of other types are passed to `reference`."""
    return _encode(value, reference, 0)


def _encode(value: Any, reference: Callable[[Any], list] | None, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, str, float):
        return value
    if kind is int:
        return value if -_SMALL < value < _SMALL else ["i", hex(value)]
    if depth >= MAX_DEPTH:
        raise NotPlain(f"nested deeper than {MAX_DEPTH}")
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], *[_encode(item, reference, depth + 1) for item in value]]
    if kind in _MAPPINGS:
        pairs = [[_encode(k, reference, depth + 2), _encode(v, reference, depth + 2)] for k, v in value.items()]
        return ["d", *pairs]
    if kind is bytes:
        return ["b", value.hex()]
    if kind is complex:
        return ["c", value.real, value.imag]
    if kind.__module__ == "numpy" and hasattr(value, "tolist"):
        return _encode(value.tolist(), reference, depth + 1)
    if reference is None:
        raise NotPlain(f"{kind.__name__} is not a plain type")
    return reference(value)


def decode(data: Any, reference: Callable[[str, int], Any] | None = None, depth: int = 0) -> Any:
    """The value of a tagged form that json.loads returned; raises NotPlain on anything else."""
    if data is None or type(data) in (bool, str, float, int):
        return data
    if type(data) is not list or not data or type(data[0]) is not str:
        raise NotPlain("no tag")
    if depth >= MAX_DEPTH:
        raise NotPlain(f"nested deeper than {MAX_DEPTH}")
    tag, items = data[0], data[1:]
    try:
        return _build(tag, items, reference, depth + 1)
    except (TypeError, ValueError, OverflowError, IndexError) as error:
        raise NotPlain(f"bad {tag!r}: {error}") from None


def _build(tag: str, items: list, reference: Callable[[str, int], Any] | None, depth: int) -> Any:
    if tag in ("l", "t"):
        values = [decode(item, reference, depth) for item in items]
        return values if tag == "l" else tuple(values)
    if tag in ("s", "f"):
        members = _hashable([decode(item, reference, depth) for item in items])
        return set(members) if tag == "s" else frozenset(members)
    if tag == "d":
        keys = _hashable([decode(key, reference, depth) for key, _ in items])
        return dict(zip(keys, [decode(value, reference, depth) for _, value in items]))
    if tag == "b":
        return bytes.fromhex(items[0])
    if tag == "i":
        return int(items[0], 16)
    if tag == "c":
        return complex(float(items[0]), float(items[1]))
    if tag in ("r", "k") and reference is not None and type(items[0]) is int:
        return reference(tag, items[0])
    raise NotPlain(f"unknown tag {tag!r}")


def _hashable(keys: list) -> list:
    """The keys; NotPlain when many have the same hash, since a table of them would take quadratic time to build."""
    if len(keys) - len({hash(key) for key in keys}) > _MAX_COLLISIONS:
        raise NotPlain("too many keys with the same hash")
    return keys


def dump_line(message: Any) -> bytes:
    """One message as one line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def load_line(line: bytes, limit: int = 1 << 62) -> Any:
    """The JSON of one line of at most `limit` bytes; raises NotPlain."""
    if len(line) > limit:
        raise NotPlain(f"longer than {limit} bytes")
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise NotPlain(f"not JSON: {error}") from None
