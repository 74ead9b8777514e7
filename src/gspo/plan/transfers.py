"""Bytes between devices and to storage: FSDP's collectives, publication, checkpoints and how often to save them."""

from __future__ import annotations

import math

from gspo.models.shape import ModelShape
from gspo.plan.constants import COLLECTIVE_SHARE, HOP_S, HOST_COPY, STORAGE_MACHINE, STORAGE_TOTAL, Device


def machines(device: Device, num: int) -> int:
    """Number of machines for `num` devices."""
    return math.ceil(num / device.per_machine)


def gather_seconds(device: Device, ranks: int, size: float, count: int = 1) -> float:
    """Seconds of `count` all-gathers (or reduce-scatters) of `size` bytes in total, in a ring over the ranks.

    Inside a machine the bytes go over the link. Between machines each rank has its own network card, so the rings of a
    machine run in parallel and the slower of link and cards decides. Every machine adds one hop of latency.
    """
    if ranks <= 1:
        return 0.0
    num = machines(device, ranks)
    rate = device.link if num == 1 else min(device.link, device.network * min(ranks, device.per_machine))
    moved = size * (ranks - 1) / ranks
    return moved / (rate * COLLECTIVE_SHARE) + count * num * HOP_S


def reduce_seconds(device: Device, replicas: int, size: float) -> float:
    """Seconds of an all-reduce of `size` bytes per rank over the replicas of a sharded model, on other machines."""
    if replicas <= 1:
        return 0.0
    return 2 * size * (replicas - 1) / replicas / (device.network * COLLECTIVE_SHARE) + 2 * math.log2(replicas) * HOP_S


def publish_seconds(shape: ModelShape, device: Device, trainers: int, workers: int, separate: bool) -> float:
    """Seconds from the end of an update until every engine has the new weights.

    In one process the engine uses the trainer's own tensors. Ranks that also generate gather all weights. Engines on
    other devices get them through host memory: gathered, copied out, sent from machine to machine, copied in.
    """
    size = float(shape.parameters * device.number_bytes)
    gather = gather_seconds(device, trainers, size, shape.layers)
    if not separate:
        return gather
    out = size / HOST_COPY
    spread = machines(device, workers)
    sent = 0.0
    if machines(device, trainers + workers) > 1:
        rate = device.network * min(device.per_machine, max(1, workers)) * COLLECTIVE_SHARE
        sent = 2 * size / rate + math.ceil(math.log2(spread + 1)) * HOP_S
    return gather + 2 * out + sent


def checkpoint_bytes(shape: ModelShape, device: Device) -> float:
    """Of the weights as a Hugging Face folder, float32 masters where the weights are narrower, and two moments."""
    masters = 4 if device.number_bytes < 4 else 0
    return float(shape.parameters * (device.number_bytes + masters + 8))


def checkpoint_seconds(shape: ModelShape, device: Device, trainers: int) -> float:
    """Seconds to write a checkpoint from all machines that train."""
    return checkpoint_bytes(shape, device) / min(STORAGE_TOTAL, STORAGE_MACHINE * machines(device, trainers))


def young_interval(save_s: float, mtbf_s: float) -> float:
    """√(2δM): the best time between checkpoints to first order (Young, CACM 17(9), 1974)."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """The best time of work between checkpoints to higher order (Daly, FGCS 22(3), 2006, eq. 37)."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    x = save_s / (2 * mtbf_s)
    return young_interval(save_s, mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - save_s


def useful_share(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time spent on work that is not lost: the inverse of Daly's expected run time under failures.

    An interval of work τ with its checkpoint δ takes M e^{R/M} (e^{(τ+δ)/M} − 1) seconds on average.
    """
    exponent = (interval_s + save_s) / mtbf_s
    if exponent > 500:
        return 0.0
    return interval_s / (mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1(exponent))
