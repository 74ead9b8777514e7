"""Property tests draw the same examples every time (HYPOTHESIS_PROFILE=explore: new ones); fixtures for all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# For `make mutants`: stop at the first failing example instead of looking for the smallest.
settings.register_profile("first_failure", settings.get_profile("fixed"), phases=(Phase.explicit, Phase.generate))
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))


@pytest.fixture(scope="session", autouse=True)
def drawing() -> Iterator[Any]:
    """Runs of tests draw no plots at their end, which takes longer than their training. Yields what draws them."""
    try:
        from gspo.report import pictures
    except ImportError:  # without matplotlib, as in the environment of vLLM, none are drawn
        yield None
        return
    draw = pictures.draw_pictures
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "draw_pictures", lambda run, index, folder: [])
        yield draw


@pytest.fixture
def no_compiled_code():
    """None of other tests, which torch finds by the layer's class, and none left behind."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()
