"""Runs here leave out the page that ends a run: drawing it takes longer than the training, and it has tests of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.loop import ending
from gspo.runs.folder import RunFolder


@pytest.fixture(scope="package", autouse=True)
def without_report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ending, "write_report", lambda console, run: None)
        yield


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """An empty run folder that nobody holds."""
    run = RunFolder(tmp_path / "run").open()
    run.close()
    return run
