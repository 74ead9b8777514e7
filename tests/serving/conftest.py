from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.support import Running, embedded, running


@pytest.fixture(scope="package")
def server() -> Iterator[Running]:
    """The embedded model, behind a key."""
    with running(embedded(), max_body=1 << 20) as started:
        yield started
