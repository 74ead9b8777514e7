"""Every key is named beside a test that shows what it changes, and that test exists and sets the key."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from gspo.config.compat.aliases import aliases
from gspo.config.loading import tree

TESTS = Path(__file__).parents[1]


def read_table() -> dict[str, list[str]]:
    """Test → its keys, from blocks of a line `file::test` and indented keys."""
    table: dict[str, list[str]] = {}
    test = ""
    for line in (TESTS / "config" / "facts" / "key_tests.txt").read_text().splitlines():
        if line.startswith(" "):
            table[test].append(line.strip())
        elif line and not line.startswith("#"):
            test = line
            assert test not in table, f"{test} has two blocks"
            table[test] = []
    return table


TABLE = read_table()


@cache
def module(path: str) -> tuple[str, frozenset[str]]:
    """The text of a file of tests, with that of its folder's fixtures, and the names of its tests."""
    text, fixtures = (TESTS / path).read_text(), (TESTS / path).with_name("conftest.py")
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
    return text + (fixtures.read_text() if fixtures.exists() else ""), frozenset(node.name for node in functions)


def test_every_key_has_a_test_that_shows_what_it_changes():
    named = [key for keys in TABLE.values() for key in keys]
    assert sorted(named) == sorted(tree.leaves())


@pytest.mark.parametrize("test", TABLE)
def test_the_test_of_a_key_exists_and_its_file_names_the_key(test):
    path, _, name = test.partition("::")
    text, tests = module(path)
    assert name in tests
    for key in TABLE[test]:
        assert key.rpartition(".")[2] in text, f"{path} never sets {key}"


def test_every_alias_sets_a_key_that_has_a_test():
    assert {alias.target for alias in aliases().values()} <= {key for keys in TABLE.values() for key in keys}
