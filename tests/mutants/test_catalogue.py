"""The mutants still match the source, and their tests exist."""

from __future__ import annotations

import ast
from collections import Counter

import pytest

from tests.mutants.catalogue import ROOT, Mutant, read_mutants

MUTANTS = read_mutants()


@pytest.mark.parametrize("room", sorted({m.room for m in MUTANTS}))
def test_every_snippet_occurs_once_and_its_replacement_is_other_code(room: str):
    problems = [problem for m in MUTANTS if m.room == room and (problem := _problem(m))]
    assert not problems, "\n".join(problems)


def _problem(mutant: Mutant) -> str | None:
    try:
        mutated = ast.dump(ast.parse(mutant.apply(ROOT)))
    except (OSError, ValueError, SyntaxError) as error:
        return f"{mutant.room}: {mutant.name}: {error}"
    if mutated == ast.dump(ast.parse((ROOT / mutant.path).read_text(encoding="utf-8"))):
        return f"{mutant.room}: {mutant.name}: the replacement is the same code"
    return None


def test_the_tests_that_must_notice_them_exist():
    missing = {path for m in MUTANTS for path in m.tests if not (ROOT / "tests" / path.partition("::")[0]).exists()}
    assert not missing and all(m.tests for m in MUTANTS)


def test_names_are_unique():
    counts = Counter((m.room, m.name) for m in MUTANTS)
    assert [name for name, count in counts.items() if count > 1] == []
