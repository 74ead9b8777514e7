"""Plain data on the wire: exact types both ways, and nothing else."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.sandbox.inside import plain

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False)
)
hashable = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(hashable, inner)
        | st.sets(hashable)
        | st.frozensets(hashable)
    ),
    max_leaves=12,
)


def exact(a: object, b: object) -> bool:
    """Equal in value and type all the way down."""
    if type(a) is not type(b) or a != b:
        return False
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return all(exact(x, y) for x, y in zip(a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        kinds = {key: type(key) for key in a}
        return all(kinds[key] is type(key) and exact(a[key], b[key]) for key in b)
    return True


@settings(max_examples=60)
@given(values)
def test_round_trip_keeps_value_and_type(value: object):
    line = plain.dump_line(plain.encode(value))
    assert line.count(b"\n") == 1
    assert exact(plain.decode(plain.load_line(line)), value)


def test_integers_of_any_size():
    value = 7**20_000
    assert plain.decode(plain.load_line(plain.dump_line(plain.encode(value)))) == value


class Equal(int):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = int.__hash__


@pytest.mark.parametrize("value", [Equal(1), object(), [Equal(1)], {1: object()}, range(3), type("S", (str,), {})("x")])
def test_subclasses_and_objects_are_not_plain(value: object):
    with pytest.raises(plain.NotPlain):
        plain.encode(value)


def test_counters_become_dictionaries():
    assert plain.decode(plain.encode(Counter("aab"))) == {"a": 2, "b": 1}


@pytest.mark.parametrize(
    "data",
    [
        {},
        [],
        ["x", 1],
        ["ls", 1],
        [1],
        ["d", 1],
        ["d", [1]],
        ["b", "zz"],
        ["i", "q"],
        ["c", 1],
        ["s", ["l"]],
        ["r", 0],
        ["b"],
    ],
)
def test_malformed_tags_are_refused(data: object):
    with pytest.raises(plain.NotPlain):
        plain.decode(data)


def test_depth_and_size_are_limited():
    deep: object = 1
    for _ in range(plain.MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(plain.NotPlain, match="nested"):
        plain.encode(deep)
    with pytest.raises(plain.NotPlain):
        plain.load_line(b"[" * 100_000 + b"]" * 100_000)
    nested: object = 1
    for _ in range(plain.MAX_DEPTH + 1):
        nested = ["l", nested]
    with pytest.raises(plain.NotPlain, match="nested"):
        plain.decode(nested)
    with pytest.raises(plain.NotPlain, match="longer"):
        plain.load_line(b"1" * (plain.MAX_BYTES + 1), plain.MAX_BYTES)
    assert plain.load_line(json.dumps("[" * 100_000).encode()) == "[" * 100_000, "brackets in text are no depth"


def test_keys_chosen_to_collide_are_refused():
    """Building such a table would take the judge hours."""
    modulus = (1 << 61) - 1
    collide = [["i", hex(k * modulus)] for k in range(1, 100_000)]
    for data in (["s", *collide], ["f", *collide], ["d", *[[key, 0] for key in collide]]):
        with pytest.raises(plain.NotPlain, match="same hash"):
            plain.decode(data)
    assert len(plain.decode(["s", *range(100_000)])) == 100_000
    assert len(plain.decode(["s", *collide[:101]])) == 101, "a hundred of them are no harm"
    with pytest.raises(plain.NotPlain, match="same hash"):
        plain.decode(["s", *collide[:102]])


def test_quotes_and_escapes_take_linear_time():
    with pytest.raises(plain.NotPlain):
        plain.load_line(b'"' + b'\\"' * 1_000_000)


@pytest.mark.parametrize("line", [b"", b"{", b"nonsense", b"\xff\xfe", b"1" * 5000])
def test_what_is_not_json_is_refused(line: bytes):
    with pytest.raises(plain.NotPlain):
        plain.load_line(line)
