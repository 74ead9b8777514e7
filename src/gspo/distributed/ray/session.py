"""The connection to a Ray cluster: one that exists, or a local one that ends with the run."""

from __future__ import annotations

import os
import socket
from typing import Any

import ray

from gspo.distributed.ray.errors import ClusterError
from gspo.distributed.ray.tensors import send_as_arrays

ADDRESS = "RAY_ADDRESS"
KNOCK_SECONDS = 10.0
USAGE_REPORTS = "RAY_USAGE_STATS_ENABLED"


class RaySession:
    """Connected from construction to `close`.

    A process that is already connected is left so; otherwise the cluster at RAY_ADDRESS is joined, and without one
    a local cluster is started, which `close`, the end of this process and its death by any signal take down again.
    """

    def __init__(self, *, num_cpus: int = 1, num_gpus: int | None = None) -> None:
        self._owned = not ray.is_initialized()
        self.is_local = False
        if self._owned and (address := os.environ.get(ADDRESS)):
            self._join(address)
        elif self._owned:
            self._start(num_cpus, num_gpus)
        send_as_arrays()

    def _join(self, address: str) -> None:
        try:
            _knock(address)
            ray.init(address=address, **_quiet())
        except Exception as error:
            raise ClusterError(
                f"{ADDRESS}={address}: no Ray cluster answers there ({type(error).__name__}: {error}); start one with "
                f"`ray start --head`, correct the address, or unset {ADDRESS} to start a local cluster"
            ) from error

    def _start(self, num_cpus: int, num_gpus: int | None) -> None:
        os.environ.setdefault(USAGE_REPORTS, "0")  # a cluster of ours reports to nobody
        self.is_local = True
        try:
            ray.init(
                address="local",
                num_cpus=max(num_cpus, os.cpu_count() or 1),  # logical: a laptop may hold more workers than cores
                num_gpus=num_gpus,
                include_dashboard=False,
                **_quiet(),
            )
        except Exception as error:
            ray.shutdown()
            raise ClusterError(
                f"a local Ray cluster could not be started ({type(error).__name__}: {error}); "
                "trainer.backend=local trains in this process"
            ) from error

    def close(self) -> None:
        """Leave the cluster; a local one ends with all its processes. May be called twice."""
        if self._owned and ray.is_initialized():
            ray.shutdown()


def _knock(address: str) -> None:
    """An OSError when nobody listens at `host:port`: Ray itself would try for minutes."""
    host, _, port = address.partition("://")[2].rpartition(":") if "://" in address else address.rpartition(":")
    if port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_SECONDS).close()


def _quiet() -> dict[str, Any]:
    """Workers' output comes to this console; Ray's own remarks do not."""
    return {"configure_logging": False, "logging_level": "ERROR", "log_to_driver": True}
