"""Which GPUs of this machine a rollout worker gets: those that no trainer rank uses, else the ranks' own."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from gspo.rollout.engine import EngineError


@dataclass(frozen=True, slots=True)
class GpuPlace:
    """The first of a worker's neighbouring GPUs, and whether a trainer rank uses one of them too."""

    first: int
    shared: bool


def gpu_place(index: int, num_gpus: int, training: Collection[int], width: int) -> GpuPlace:
    """The place of the `index`-th worker of `width` GPUs each, on a machine whose GPUs `training` train.

    Workers are spread over the GPUs that are left; when those are too few for one, over all of them.
    """
    free = _runs(num_gpus, training, width)
    places = free or _runs(num_gpus, (), width)
    if not places:
        raise EngineError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={width}: this machine has {num_gpus} "
            f"GPU{'s' * (num_gpus != 1)}; set it to {num_gpus} or less, or place workers on a cluster (trainer.backend=ray)"
        )
    return GpuPlace(places[index % len(places)], shared=not free)


def _runs(num_gpus: int, taken: Collection[int], width: int) -> list[int]:
    """The first of every `width` neighbours that are not taken, from the lowest number on."""
    found, first = [], 0
    while first + width <= num_gpus:
        if any(gpu in taken for gpu in range(first, first + width)):
            first += 1
        else:
            found.append(first)
            first += width
    return found
