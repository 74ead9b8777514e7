from __future__ import annotations

from collections.abc import Iterator

import pytest

from gspo.sandbox import Sandbox, examine_level
from tests.faults.programs.attack import World, make_world


def granted(level: int) -> bool:
    return examine_level(level).granted


@pytest.fixture(scope="session")
def box() -> Iterator[Sandbox]:
    """The default sandbox, one server, shared by tests that do not break it."""
    with Sandbox(num_servers=1) as sandbox:
        yield sandbox


@pytest.fixture(scope="session", params=[1, 2, 3])
def leveled(request: pytest.FixtureRequest) -> Iterator[Sandbox]:
    """A sandbox at each level this machine grants."""
    if not granted(request.param):
        pytest.skip(f"level {request.param}: {examine_level(request.param).reason}")
    with Sandbox(request.param, num_servers=1) as sandbox:
        yield sandbox


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    with make_world() as made:
        yield made
