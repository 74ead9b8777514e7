"""The Connection contract, run on each implementation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from gspo.rollout.workers.process import ProcessConnection
from tests.contracts.connection import Connect, ConnectionContract
from tests.distributed.ray.local_ray import cluster
from tests.rollout.workers.processes import wait_until, workers
from tests.rollout.workers.thread_connection import ThreadConnection
from tests.rollout.workers.toy_engine import build, make_spec

__all__ = ["cluster"]


class TestThreadConnection(ConnectionContract):
    @pytest.fixture
    def connect(self) -> Connect:
        return lambda **options: ThreadConnection(lambda: build(make_spec(**options)), 3)


class TestProcessConnection(ConnectionContract):
    @pytest.fixture
    def connect(self) -> Iterator[Connect]:
        with ExitStack() as stack:

            def start(**options: Any) -> ProcessConnection:
                connection = ProcessConnection(make_spec(**options), 3)
                stack.callback(connection.close)
                stack.callback(connection.kill)
                return connection

            yield start
        assert wait_until(lambda: not workers(), 10), "a worker process was left"


@pytest.mark.slow
class TestRayConnection(ConnectionContract):
    @pytest.fixture
    def connect(self, cluster: Any) -> Iterator[Connect]:
        from gspo.distributed.ray.connection import RayConnection

        with ExitStack() as stack:

            def start(**options: Any) -> RayConnection:
                connection = RayConnection(make_spec(**options), {"num_cpus": 1}, name="rollout worker 3")
                stack.callback(connection.close)
                stack.callback(connection.kill)
                return connection

            yield start
