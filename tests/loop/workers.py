"""Rollout workers in threads, for runs whose tests are not about processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from gspo.build import engines
from gspo.rollout.workers.worker import EngineSpec, build_engine
from tests.rollout.workers.thread_connection import ThreadConnection


def connect(spec: EngineSpec, index: int = 0, log: Path | None = None) -> ThreadConnection:
    engine = build_engine(spec)  # here: transformers does not load models in two threads at once
    return ThreadConnection(lambda: engine, index)


def use_threads(patch: pytest.MonkeyPatch) -> None:
    """From here on a run's rollout workers are threads of this process."""
    patch.setattr(engines, "ProcessConnection", connect)
