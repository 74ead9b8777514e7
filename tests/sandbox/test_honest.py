"""Honest programs run unhindered at every level, and a long mix of programs stays right."""

from __future__ import annotations

import pytest

from gspo.sandbox import Sandbox
from tests.faults import sandbox_rows
from tests.faults.programs.honest import HONEST


def test_there_are_enough():
    assert len({honest.name for honest in HONEST}) == len(HONEST) >= 30


def test_honest_programs_are_not_refused(leveled: Sandbox):
    programs = sandbox_rows.honest_programs(leveled.level)
    assert len(programs) >= 30
    assert [fault for program in programs if (fault := sandbox_rows.honest_fault(leveled, program))] == []


def test_mixed_runs_are_right_and_steady():
    row = sandbox_rows.mixed_row(seed=5, runs=120)
    assert row.passed, row.detail


@pytest.mark.slow
def test_ten_thousand_mixed_runs():
    row = sandbox_rows.mixed_row(seed=6)
    assert row.passed, row.detail
