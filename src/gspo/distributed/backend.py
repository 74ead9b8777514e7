"""The interface between a run and a cluster that starts its processes."""

from __future__ import annotations

from typing import Protocol

from gspo.config import TrainerConfig
from gspo.distributed.rank_group import RankGroup
from gspo.rollout.workers.connection import Connection
from gspo.rollout.workers.weight_store import WeightStore
from gspo.rollout.workers.worker import EngineSpec


class ClusterError(RuntimeError):
    """The cluster cannot be reached or lacks resources for the run. The message names what to change."""


class Backend(Protocol):
    """Starts the trainer ranks and rollout workers of a run on a cluster. `RayBackend` implements it.

    A run that returns to a checkpoint closes its ranks and workers and calls `start` again.
    """

    def start(self, config: TrainerConfig) -> None:
        """Connect and reserve the resources of the config; an error names what the cluster lacks."""
        ...

    def ranks(self) -> RankGroup:
        """New trainer ranks, joined and without models."""
        ...

    def num_rollout_workers(self) -> int:
        """Number of separate rollout workers; 0 when the trainer's ranks generate."""
        ...

    def connect(self, spec: EngineSpec, index: int) -> Connection:
        """Start rollout worker `index`, or its replacement, with the engine of `spec`. Returns the connection to it."""
        ...

    def weights(self) -> WeightStore:
        """A store through which those workers receive versions of the weights."""
        ...

    def close(self) -> None:
        """End all processes of the run and leave the cluster. May be called twice."""
        ...
