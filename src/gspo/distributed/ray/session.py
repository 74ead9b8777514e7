"""The connection to a Ray cluster: an existing one, or a local one that ends with the run."""

from __future__ import annotations

import os
import socket
from typing import Any

import ray

from gspo.distributed.backend import ClusterError
from gspo.distributed.ray.head_watch import HeadWatch
from gspo.distributed.ray.tensors import send_as_arrays

ADDRESS = "RAY_ADDRESS"
CONNECT_SECONDS = 10.0
USAGE_REPORTS = "RAY_USAGE_STATS_ENABLED"
# Show the workers' output on this console, without Ray's own messages.
LOGGING: dict[str, Any] = {"configure_logging": False, "logging_level": "ERROR", "log_to_driver": True}


class RaySession:
    """Connected from construction to `close`.

    Uses this process's existing connection, else the cluster at RAY_ADDRESS, else starts a local cluster. A local one
    ends with `close` and with this process, whatever ends it.
    """

    def __init__(self, *, num_cpus: int = 1) -> None:
        self._owned = not ray.is_initialized()
        if self._owned and (address := os.environ.get(ADDRESS)):
            self._join(address)
        elif self._owned:
            self._start(num_cpus)
        send_as_arrays()
        self._watch = HeadWatch(ray.get_runtime_context().gcs_address)

    def _join(self, address: str) -> None:
        try:
            _check_port(address)
            ray.init(address=address, **LOGGING)
        except Exception as error:
            raise ClusterError(
                f"{ADDRESS}={address}: no Ray cluster answers there ({type(error).__name__}: {error}); start one with "
                f"`ray start --head`, correct the address, or unset {ADDRESS} to start a local cluster"
            ) from error

    def _start(self, num_cpus: int) -> None:
        os.environ.setdefault(USAGE_REPORTS, "0")  # no usage reports from a local cluster
        try:
            ray.init(
                address="local",
                num_cpus=max(num_cpus, os.cpu_count() or 1),  # logical CPUs: there may be more workers than cores
                include_dashboard=False,
                **LOGGING,
            )
        except Exception as error:
            ray.shutdown()
            raise ClusterError(
                f"a local Ray cluster could not be started ({type(error).__name__}: {error}); "
                "trainer.backend=local trains in this process"
            ) from error

    def close(self) -> None:
        """Leave the cluster; a local one ends with all its processes. May be called twice."""
        self._watch.close()
        if self._owned and ray.is_initialized():
            ray.shutdown()


def _check_port(address: str) -> None:
    """Raise OSError when nothing listens at `host:port`; Ray itself would retry for minutes."""
    host, _, port = address.partition("://")[2].rpartition(":") if "://" in address else address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
