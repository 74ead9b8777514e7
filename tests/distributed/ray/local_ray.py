"""A small local Ray, started once and ended with the tests."""

from __future__ import annotations

import os

import pytest

MEGABYTE = 1024 * 1024


@pytest.fixture(scope="session")
def cluster():
    """This process is connected to a cluster of 8 logical CPUs."""
    import ray

    if ray.is_initialized():  # two folders have this fixture, a session one Ray
        yield ray
        return
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local",
        num_cpus=8,
        num_gpus=0,
        object_store_memory=100 * MEGABYTE,
        include_dashboard=False,
        configure_logging=False,
        logging_level="ERROR",
        log_to_driver=False,
        _system_config={"prestart_worker_first_driver": False},
    )
    yield ray
    ray.shutdown()
