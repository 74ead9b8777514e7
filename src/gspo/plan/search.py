"""The best split of a cluster between rollout and training, found by trying the candidates that make sense."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from gspo.models.shape import ModelShape
from gspo.plan.constants import Device
from gspo.plan.memory import ModelSize, trainer_memory
from gspo.plan.predict import Prediction, predict, training_time
from gspo.plan.seconds_by_part import SecondsByPart
from gspo.plan.split import Split
from gspo.plan.workload import Workload

MAX_CANDIDATES = 32  # numbers of trainer ranks to try on a large cluster


@dataclass(frozen=True)
class Plan:
    """The best prediction of each mode, fastest first. `found` is empty when nothing fits."""

    shape: ModelShape
    device: Device
    gpus: int
    work: Workload
    found: tuple[Prediction, ...]
    tried: int

    @property
    def best(self) -> Prediction | None:
        return self.found[0] if self.found else None


def search(shape: ModelShape, device: Device, gpus: int, work: Workload) -> Plan:
    """The fastest split that fits, of one pool, of two pools, and with eta > 0 of two pools that run at once."""
    if gpus < 1:
        raise ValueError(f"--gpus {gpus}: expected at least 1")
    sync_work = dataclasses.replace(work, eta=0)
    modes = [
        (sync_work, _one_pool(shape, device, gpus, sync_work)),
        (sync_work, _two_pools(shape, device, gpus, sync_work)),
    ]
    if work.eta:
        modes.append((work, _two_pools(shape, device, gpus, work)))
    tried = [[predict(shape, device, mode_work, split) for split in splits] for mode_work, splits in modes]
    fitting = [[made for made in mode if made is not None] for mode in tried]
    best = [min(mode, key=lambda p: p.step_s) for mode in fitting if mode]
    return Plan(shape, device, gpus, work, tuple(sorted(best, key=lambda p: p.step_s)), sum(map(len, tried)))


def smallest_cluster(shape: ModelShape, device: Device, work: Workload) -> int | None:
    """The smallest power of two of devices, up to 1,024, on which some split fits; None when none does."""
    sizes = (2**i for i in range(11))
    return next((gpus for gpus in sizes if search(shape, device, gpus, work).best is not None), None)


def _one_pool(shape: ModelShape, device: Device, gpus: int, work: Workload) -> Iterator[Split]:
    choices = itertools.product(tensor_parallel(shape, device, gpus), shard_sizes(gpus), _checkpointing(work))
    return (Split(gpus, gpus, False, tp, shard, recompute) for tp, shard, recompute in choices)


def _two_pools(shape: ModelShape, device: Device, gpus: int, work: Workload) -> Iterator[Split]:
    """For each number of ranks: the fastest way to train that fits, with every engine size."""
    for trainers in trainer_counts(gpus, device.per_machine):
        best = _best_training(shape, device, work, trainers)
        if best is None:
            continue
        for tp in tensor_parallel(shape, device, gpus - trainers):
            yield dataclasses.replace(best, rollout=gpus - trainers, tp=tp)


def _best_training(shape: ModelShape, device: Device, work: Workload, trainers: int) -> Split | None:
    model = ModelSize.of(shape, device.number_bytes)
    shards = itertools.product(shard_sizes(trainers), _checkpointing(work))
    splits = [Split(trainers, 0, True, 1, shard, recompute) for shard, recompute in shards]
    fitting = [s for s in splits if trainer_memory(model, device, work, s).with_reserve(device).fits(device)]

    def seconds(split: Split) -> float:
        return SecondsByPart.sum(training_time(shape, device, work, split).values()).total

    return min(fitting, key=seconds, default=None)


def _checkpointing(work: Workload) -> tuple[bool, ...]:
    return (False, True) if work.checkpointing is None else (work.checkpointing,)


def tensor_parallel(shape: ModelShape, device: Device, devices: int) -> list[int]:
    """Numbers of devices per engine that divide the heads and the devices, within one machine."""
    sizes = [2**i for i in range(8)]
    return [t for t in sizes if t <= min(devices, device.per_machine) and shape.heads % t == 0 and devices % t == 0]


def shard_sizes(ranks: int) -> list[int]:
    """Sizes of a shard group: powers of two that divide the ranks, and all ranks."""
    return sorted({2**i for i in range(14) if 2**i <= ranks and ranks % 2**i == 0} | {ranks})


def trainer_counts(gpus: int, per_machine: int) -> list[int]:
    """Numbers of ranks to try: every number on two machines, whole machines beyond, fewer on large clusters."""
    if gpus <= 2 * per_machine:
        return list(range(1, gpus))
    whole = list(range(per_machine, gpus, per_machine))
    if len(whole) <= MAX_CANDIDATES:
        return whole
    picked = {round(i * (len(whole) - 1) / (MAX_CANDIDATES - 1)) for i in range(MAX_CANDIDATES)}
    return [whole[i] for i in sorted(picked | {2**i - 1 for i in range(12) if 2**i <= len(whole)})]
