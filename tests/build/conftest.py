"""A small model that the tests of this folder only read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.small_run import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))
