"""The protocol between the training loop and whatever gives it batches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from gspo.sampling.step_counts import SamplingCounts
from gspo.types import Group


class Sampler(Protocol):
    """Gives batches of groups. All calls come from one thread; every batch is released before the next is asked for."""

    @property
    def version(self) -> int:
        """Batches released so far, which is the version of the live weights."""
        ...

    def next_batch(self) -> tuple[list[Group], SamplingCounts]:
        """The groups of the next training step, in order of submission, and counts of what it took to get them.

        Raises a SamplingError (errors.py) when there is no batch; a checkpoint can be saved after any of them.
        """
        ...

    def release(self, groups: list[Group]) -> None:
        """State that `groups`, the last batch, have been trained on and that the new weights are live."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Everything that a resumed run needs, as plain JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state: on a new sampler with an idle engine that has the weights of the state."""
        ...

    def close(self) -> None:
        """End threads. The engine has been closed before."""
        ...
