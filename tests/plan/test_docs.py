"""docs/scaling.md shows what the program predicts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_the_predicted_tables_are_current():
    done = subprocess.run(
        [sys.executable, "scripts/make_scaling_docs.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
