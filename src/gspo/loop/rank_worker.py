"""One trainer rank: its shards of the models, its share of every batch, and its rollout engine."""

from __future__ import annotations

from typing import Any

from gspo.loop.team import Place


class RankWorker:
    """What a Team calls. Every method is called on all ranks at once with the same arguments.

    A host (torchrun's process, a Ray actor) makes one, calls `join` once with its place, and then `run` for every call.
    """

    def __init__(self) -> None:
        self.place: Place | None = None

    def join(self, place: Place) -> None:
        """Meet the other ranks: sets up torch.distributed (gloo on CPUs; nccl beside it on GPUs)."""
        raise NotImplementedError

    def run(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a method by name: what hosts use."""
        return getattr(self, method)(*args)

    def leave(self) -> None:
        """Free the models and leave torch.distributed."""
        raise NotImplementedError
