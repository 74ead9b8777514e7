"""Workers are replaced at once in tests."""

from __future__ import annotations

import pytest

from gspo.rollout.workers import worker_slot


@pytest.fixture(autouse=True)
def no_backoff(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_slot, "BACKOFF", (0.0, 0.0, 0.0))
