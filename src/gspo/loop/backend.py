"""Where the processes of a run live when they are not this one: what `build` asks of a cluster."""

from __future__ import annotations

from typing import Any, Protocol

from gspo.config import TrainerConfig
from gspo.loop.team import Team


class Backend(Protocol):
    """Gives a run its trainer ranks and its rollout workers. `gspo.cluster` has the one of Ray.

    `start` may be called again after `close` of a team and its workers (a run that goes back to a checkpoint); `close`
    ends everything the backend started.
    """

    def start(self, config: TrainerConfig) -> None:
        """Connect and reserve what the config asks for; an error names what the cluster lacks."""
        ...

    def team(self) -> Team:
        """New trainer ranks, joined and without models."""
        ...

    def num_rollout_workers(self) -> int:
        """Rollout workers in processes of their own; 0 when the trainer's ranks generate themselves."""
        ...

    def connect(self, spec: Any) -> Any:
        """A Connection to a new rollout worker that hosts the engine `spec` describes."""
        ...

    def close(self) -> None:
        """End all processes that belong to the run and leave the cluster. May be called twice."""
        ...
