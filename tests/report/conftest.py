"""A finished made-up run, shared by the tests that only read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.report.synthetic import Plan, make_run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "embedded", Plan())
