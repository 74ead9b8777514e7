"""Values as the type of a key: converted where only one meaning is possible, refused otherwise."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.config.loading.coerce import WrongType, coerce

SAME = [
    (3, int, 3),
    (3.0, int, 3),
    ("3", int, 3),
    ("3e2", int, 300),
    (10**400, int, 10**400),
    (3, float, 3.0),
    ("1e-4", float, 1e-4),
    (True, bool, True),
    ("Yes", bool, True),
    ("off", bool, False),
    (7, str, "7"),
    (1.5, str, "1.5"),
    ("null", type(None), None),
    (None, int | None, None),
    ("none", int | None, None),
    (False, int | None, None),  # `off`
    (False, bool | None, False),
    (5, int | str, 5),
    ("auto", int | str, "auto"),
    ("5", str | int, "5"),  # it has one of the types already
    ((1, 2), list[int], [1, 2]),
    (["1", 2.0], list[float], [1.0, 2.0]),
    ({"a": 1}, dict[str, Any], {"a": 1}),
    ([1], Any, [1]),
]
WRONG = [
    (2.5, int),
    ("2.5", int),
    ("x", int),
    (True, int),
    (False, float),
    (True, str),
    (None, int),
    (None, str),
    (float("inf"), int),
    (float("nan"), int),
    (10**400, float),
    (1, bool),
    ("maybe", bool),
    ("1", list[int]),
    ([1, "x"], list[int]),
    ({"a": 1}, list[int]),
    ([1], dict[str, Any]),
    ([1], int | None),
    ({}, int | str),
    (0, type(None)),
]


@pytest.mark.parametrize(("value", "kind", "wanted"), SAME)
def test_a_value_with_one_meaning_is_converted(value, kind, wanted):
    got = coerce(value, kind)
    assert got == wanted and type(got) is type(wanted)


@pytest.mark.parametrize(("value", "kind"), WRONG)
def test_a_value_of_another_type_is_refused(value, kind):
    with pytest.raises(WrongType):
        coerce(value, kind)
