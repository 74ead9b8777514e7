"""The mutants still match the source, and their tests exist."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.mutants.catalogue import ROOT, Mutant, read_mutants

MUTANTS = read_mutants()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.room}: {m.name}")
def test_the_snippet_occurs_once_and_its_replacement_is_other_code(mutant: Mutant):
    mutated = ast.dump(ast.parse(mutant.apply(ROOT)))
    assert mutated != ast.dump(ast.parse((ROOT / mutant.path).read_text(encoding="utf-8")))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: f"{m.room}: {m.name}")
def test_the_tests_that_must_notice_it_exist(mutant: Mutant):
    assert mutant.tests
    for path in mutant.tests:
        assert (ROOT / "tests" / path).exists(), path


def test_names_are_unique():
    counts = Counter((m.room, m.name) for m in MUTANTS)
    assert [name for name, count in counts.items() if count > 1] == []
