"""The prediction of one step for a split of the devices, and the search for the fastest split of a cluster."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from gspo.models.shape import ModelShape
from gspo.plan.constants import HOST_COPY, WAITING_SHARE, Device
from gspo.plan.decode import PREFILL, DecodeCost, again, generate, steady
from gspo.plan.memory import Memory, ModelSize, colocated_memory, engine_memory, most_slots, trainer_memory
from gspo.plan.seconds_by_part import SecondsByPart
from gspo.plan.split import Split
from gspo.plan.train_time import TrainCost
from gspo.plan.transfers import checkpoint_seconds, publish_seconds
from gspo.plan.workload import Workload

PUBLISH = "publishing weights"
WAITING = "waiting for the host"
STALE = "longest responses under the staleness bound"
MAX_CANDIDATES = 32  # numbers of trainer ranks to try on a large cluster


@dataclass(frozen=True)
class Prediction:
    """What a split would do. `parts`: where the time of the step goes, of the slowest side if two run at once."""

    split: Split
    eta: int
    step_s: float
    stages: dict[str, float]
    parts: SecondsByPart
    trainer_memory: Memory
    rollout_memory: Memory
    slots: int
    rollout: RolloutTime
    group_s: float  # from the start of a group to the end of its last response
    checkpoint_s: float
    trained_tokens: float

    @property
    def limit(self) -> str:
        """What takes most of the step."""
        return self.parts.largest

    @property
    def tokens_per_s(self) -> float:
        """Response tokens trained on per second."""
        return self.trained_tokens / self.step_s

    @property
    def mode(self) -> str:
        if not self.split.separate:
            return "one pool, sync"
        return f"two pools, async, η={self.eta}" if self.eta else "two pools, sync"

    def to_dict(self) -> dict[str, Any]:
        s = self.split
        return {
            "mode": self.mode,
            "trainers": s.trainers,
            "rollout_devices": s.rollout,
            "tensor_parallel": s.tp,
            "fsdp_size": s.shard,
            "gradient_checkpointing": s.checkpointing,
            "step_s": self.step_s,
            "tokens_per_s": self.tokens_per_s,
            "limit": self.limit,
            "stages_s": self.stages,
            "parts_s": dict(self.parts.ranked()),
            "trainer_bytes": self.trainer_memory.at_peak,
            "rollout_bytes": self.rollout_memory.at_peak,
            "slots": self.slots,
            "rows": self.rollout.rows,
            "decode_step_s": self.rollout.step_s,
            "group_s": self.group_s,
            "checkpoint_s": self.checkpoint_s,
        }


@dataclass(frozen=True)
class RolloutTime:
    """Seconds of generation for one step."""

    seconds: float
    parts: SecondsByPart
    rows: float  # responses that an engine generates at once, on average
    step_s: float  # a decode step
    single_s: float  # a decode step with a single group
    longest_s: float = 0.0  # until the longest response of a step is finished, where generation never drains


def training_time(shape: ModelShape, device: Device, work: Workload, split: Split) -> dict[str, SecondsByPart]:
    """Seconds of scoring, reference, critic and update on the ranks of a split, by stage."""
    trainer = TrainCost(shape, device, split)
    found = {"old_log_prob": trainer.score(work), "update_actor": trainer.update(work)}
    if work.reference:
        found["ref"] = trainer.reference(work)
    if work.critic:
        eager = replace(work, compiled=False)  # only the policy is compiled
        found["values"], found["update_critic"] = trainer.reference(work), trainer.update(eager)
    return found


def predict(shape: ModelShape, device: Device, work: Workload, split: Split) -> Prediction | None:
    """The prediction for this split; None when it does not fit into the memory of the devices."""
    model = ModelSize.of(shape, device.number_bytes)
    trainer = trainer_memory(model, device, work, split)
    if not trainer.with_reserve(device).fits(device) or split.engines < 1:
        return None

    # Pages hold the tokens in use; a slot without pages has room for the longest response.
    slot_tokens = work.mean_prompt + work.lengths.mean if device.is_gpu else work.slot_tokens

    def rollout_memory(slots: int) -> Memory:
        engine = engine_memory(model, device, work, tp=split.tp, slots=slots, slot_tokens=slot_tokens)
        if not split.separate:
            engine = colocated_memory(trainer, engine, device, one_process=split.trainers == 1)
        return engine.with_reserve(device)

    wanted = min(float(work.slots), math.ceil(work.groups_at_once * work.group_size / split.engines))
    slots = most_slots(lambda n: rollout_memory(n).fits(device), wanted)
    if slots == 0:
        return None
    rollout, training = _rollout_time(shape, device, work, split, slots), training_time(shape, device, work, split)
    publish = publish_seconds(shape, device, split.trainers, split.rollout, split.separate)
    stages = {"gen": rollout.seconds, **{n: s.total for n, s in training.items()}, "update_weights": publish}
    step_s, parts = _step_time(work, rollout, SecondsByPart.sum(training.values()), publish, stages)
    return Prediction(
        split=split,
        eta=work.eta,
        step_s=step_s,
        stages=stages,
        parts=parts,
        trainer_memory=trainer.with_reserve(device) if split.separate else rollout_memory(slots),
        rollout_memory=rollout_memory(slots),
        slots=slots,
        rollout=rollout,
        group_s=work.lengths.longest_of(work.group_size) * rollout.step_s,
        checkpoint_s=checkpoint_seconds(shape, device, split.trainers),
        trained_tokens=work.rows * work.lengths.mean,
    )


def _rollout_time(shape: ModelShape, device: Device, work: Workload, split: Split, slots: int) -> RolloutTime:
    """Generation for one step: a batch that is waited for, or a stream that never drains."""
    engine, lengths = DecodeCost(shape, device, split.tp, work.eager), work.lengths
    context = work.mean_prompt + lengths.residual_mean
    single = engine.step(float(work.group_size), context).total
    if not work.eta and not work.max_staleness:
        asked = [groups * work.group_size / split.engines for groups in work.rounds]
        parts = SecondsByPart.sum(
            generate(engine, rows, split.engines, slots, lengths, work.mean_prompt, work.group_size) for rows in asked
        )
        rows = min(asked[0], float(slots))
        return RolloutTime(parts.total, parts, rows, engine.step(rows, context).total, single)
    fills = work.fills_slots and device.is_gpu and split.trainers == 1 and not split.separate
    share = 1.0 if fills else work.running_share
    running = work.groups_at_once * work.group_size * share
    rows = min(float(slots), max(1.0, running / split.engines))
    decode = steady(engine, rows, work.mean_prompt, lengths, work.group_size)
    engines, step = min(float(split.engines), running / rows), decode.total
    responses = work.generated_groups * work.group_size
    seconds = responses * lengths.mean / (engines * (rows / step))
    parts = decode.times(seconds / step)
    if not work.keeps_cache:
        groups = rows / (work.group_size * work.running_share)
        parts.add({PREFILL: again(engine, rows, work.mean_prompt, lengths, groups)})
    if device.is_gpu:
        parts[WAITING] = parts.total * WAITING_SHARE / (1 - WAITING_SHARE)
    seconds = parts.total
    longest = lengths.longest_of(responses) * step
    if not work.eta:  # carried groups continue when the next step generates, not during training
        bound = longest / (work.max_staleness + 1)
        if bound > seconds:
            seconds, parts = bound, SecondsByPart({STALE: bound})
        return RolloutTime(seconds, parts, rows, step, single, longest)
    pause = shape.parameters * device.number_bytes / split.tp / HOST_COPY
    parts[PUBLISH] = pause
    return RolloutTime(seconds + pause, parts, rows, step, single, longest)


def _step_time(
    work: Workload, rollout: RolloutTime, training: SecondsByPart, publish: float, stages: dict[str, float]
) -> tuple[float, SecondsByPart]:
    """Seconds of a step and where they go: the sum of all stages, or with η > 0 the slowest of three at once.

    With η, (η+1) batches may be outstanding, one of them in training, so η batches are generated at once. A group
    started right after a publication must be trained on within the next η steps: (η+1) steps include its generation and
    one training.
    """
    train = SecondsByPart({**training, PUBLISH: publish})
    if not work.eta:
        both = SecondsByPart.sum((rollout.parts, train))
        return both.total, both
    bound = (rollout.longest_s + training.total + publish) / (work.eta + 1)
    stages["staleness bound"] = bound
    sides = (rollout.seconds, rollout.parts), (train.total, train), (bound, SecondsByPart({STALE: bound}))
    return max(sides, key=lambda side: side[0])


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
    sync_work = replace(work, eta=0)
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
            yield replace(best, rollout=gpus - trainers, tp=tp)


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
