"""The test of a key notices when the key is read as its default."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_key_has_a_test_that_notices():
    command = [sys.executable, "-m", "tests.config.frozen"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, [line for line in done.stdout.splitlines() if not line.startswith("noticed")]
