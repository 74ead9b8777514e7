"""Where the processes of a run live when they are not this one: what `build` asks of a cluster."""

from __future__ import annotations

from typing import Protocol

from gspo.config import TrainerConfig
from gspo.distributed.rank_group import RankGroup
from gspo.rollout.workers.connection import Connection
from gspo.rollout.workers.weight_store import WeightStore
from gspo.rollout.workers.worker import EngineSpec


class ClusterError(RuntimeError):
    """The cluster cannot be reached or lacks what the run asks for; the message names what to change."""


class Backend(Protocol):
    """Gives a run its trainer ranks and its rollout workers. `gspo.cluster` has the one of Ray.

    `start` may be called again after `close` of a team and its workers (a run that goes back to a checkpoint); `close`
    ends everything the backend started.
    """

    def start(self, config: TrainerConfig) -> None:
        """Connect and reserve what the config asks for; an error names what the cluster lacks."""
        ...

    def ranks(self) -> RankGroup:
        """New trainer ranks, joined and without models."""
        ...

    def num_rollout_workers(self) -> int:
        """Rollout workers in processes of their own; 0 when the trainer's ranks generate themselves."""
        ...

    def connect(self, spec: EngineSpec, index: int) -> Connection:
        """A Connection to a new rollout worker, the `index`-th or its successor, with the engine `spec` describes."""
        ...

    def weights(self) -> WeightStore:
        """Where versions of the weights are published for those workers."""
        ...

    def close(self) -> None:
        """End all processes that belong to the run and leave the cluster. May be called twice."""
        ...
