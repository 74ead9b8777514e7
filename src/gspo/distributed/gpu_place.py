"""Which GPUs of this machine a rollout worker uses: GPUs without a trainer rank, else shared ones."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from gspo.rollout.engine import EngineError


class GpuPlace(NamedTuple):
    """The first of a worker's adjacent GPUs, and whether it shares them with trainer ranks."""

    first: int
    shared: bool


def gpu_place(index: int, num_gpus: int, training: Collection[int], width: int) -> GpuPlace:
    """The place of worker `index`, where every worker has `width` GPUs and trainer ranks use the GPUs `training`.

    Workers are spread over the other GPUs. If those are too few for one worker, they are spread over all GPUs.
    """
    free = _starts(num_gpus, training, width)
    places = free or _starts(num_gpus, (), width)
    if not places:
        raise EngineError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={width}: this machine has {num_gpus} "
            f"GPU{'s' * (num_gpus != 1)}; set it to {num_gpus} or less, or place workers on a cluster (trainer.backend=ray)"
        )
    return GpuPlace(places[index % len(places)], shared=not free)


def _starts(num_gpus: int, taken: Collection[int], width: int) -> list[int]:
    """The first GPU of each run of `width` adjacent GPUs that are not taken, from GPU 0 on."""
    found, first = [], 0
    while first + width <= num_gpus:
        if any(gpu in taken for gpu in range(first, first + width)):
            first += 1
        else:
            found.append(first)
            first += width
    return found
