"""A furnished folder to run doors in."""

from __future__ import annotations

import pytest

from tests.distributed.ray.local_ray import cluster
from tests.doors.worlds import fake_hub, furnish

__all__ = ["cluster"]


@pytest.fixture(scope="session")
def furnished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("doors")
    furnish(folder)
    return folder


@pytest.fixture
def here(furnished, tmp_path, monkeypatch):
    """The current folder is a fresh one in which the documents' models, data and a reward are found."""
    for item in furnished.iterdir():
        (tmp_path / item.name).symlink_to(item)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("gspo.data.tasks.gsm8k.hub_records", fake_hub(furnished))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("gspo.loop.ending.write_report", lambda console, run: None)  # has tests of its own
    return tmp_path
