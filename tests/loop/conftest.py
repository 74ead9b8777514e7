"""Runs here leave out the page that ends a run: drawing it takes longer than the training, and it has tests of its own."""

from __future__ import annotations

import pytest

from gspo.loop import ending


@pytest.fixture(scope="package", autouse=True)
def without_report():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ending, "write_report", lambda console, run: None)
        yield
