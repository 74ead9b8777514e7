"""Hypothesis strategies that damage files: bytes in their place, or values inside their JSON."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

ODD = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.sampled_from([float("nan"), float("inf"), -0.0, 1e308, 5e-324, 10**400, -5, 10**15]),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["", "\0", "../../etc/passwd", "<script>", "${oops}", "\ud800", "x" * 5000]),
    st.lists(st.integers(0, 3), max_size=3),
    st.just([[[[]]]]),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


@st.composite
def damaged_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """The bytes cut short, or with some of them replaced, removed or added."""
    at = draw(st.integers(0, max(0, len(data) - 1)))
    kind = draw(st.sampled_from(["cut", "replace", "insert", "remove", "repeat"]))
    some = draw(st.binary(min_size=1, max_size=6))
    return {
        "cut": data[:at],
        "replace": data[:at] + some + data[at + len(some) :],
        "insert": data[:at] + some + data[at:],
        "remove": data[:at] + data[at + len(some) :],
        "repeat": data + data[at:],
    }[kind]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all values inside a value of JSON, itself included."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(below for key, item in inner for below in places(item, (*path, key)))]


@st.composite
def damaged_value(draw: st.DrawFn, value: Any) -> Any:
    """The value with one to three of its parts replaced by something odd, or removed."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(value)))
        if not path:
            return copy.deepcopy(draw(ODD))
        node = value
        for key in path[:-1]:
            node = node[key]
        if draw(st.booleans()):
            node[path[-1]] = copy.deepcopy(draw(ODD))
        else:
            del node[path[-1]]
    return value


def to_text(value: Any) -> bytes:
    return json.dumps(value).encode("utf-8", "surrogatepass")
