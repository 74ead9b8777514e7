"""A finished made-up run, shared by the tests that only read it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.report.synthetic import Plan, make_run


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "embedded", Plan())


@pytest.fixture(scope="module", autouse=True)
def plots(drawing: Any) -> Iterator[None]:
    """Here plots are drawn."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gspo.report.pictures.draw_pictures", drawing)
        yield
