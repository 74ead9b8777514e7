"""docs/scaling.md shows what the program predicts."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.support.preloaded import preloaded_python

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_predicted_tables_are_current():
    done = subprocess.run(
        [preloaded_python(), "scripts/make_scaling_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
