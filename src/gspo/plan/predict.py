"""One step predicted: how long each stage takes, what a device holds, and what limits it, for a given split."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from gspo.models.shape import ModelShape
from gspo.plan.constants import HOST_COPY, Device
from gspo.plan.decode import Engine, generate, steady
from gspo.plan.memory import Memory, ModelSize, colocated_memory, engine_memory, most_slots, trainer_memory
from gspo.plan.seconds_by_part import SecondsByPart
from gspo.plan.split import Split
from gspo.plan.train_time import TrainCost
from gspo.plan.transfers import checkpoint_seconds, publish_seconds
from gspo.plan.workload import Workload

PUBLISH = "publishing weights"
STALE = "the longest answers within the staleness bound"


@dataclass(frozen=True)
class Prediction:
    """What a split would do. `parts` are the seconds of what decides the step, by what they are spent on."""

    split: Split
    eta: int
    step_s: float
    stages: dict[str, float]
    parts: SecondsByPart
    trainer_memory: Memory
    rollout_memory: Memory
    slots: int
    rows: float  # answers an engine runs at once, on average when it is full
    decode_step_s: float
    single_step_s: float
    group_s: float  # from a group's start to its last answer
    checkpoint_s: float
    trained_tokens: float

    @property
    def limit(self) -> str:
        """What most of the step is spent on."""
        return self.parts.largest

    @property
    def tokens_per_s(self) -> float:
        """Answer tokens trained on, a second."""
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
            "rows": self.rows,
            "decode_step_s": self.decode_step_s,
            "group_s": self.group_s,
            "checkpoint_s": self.checkpoint_s,
        }


@dataclass(frozen=True)
class TrainingPart:
    """The training part of a prediction."""

    stages: dict[str, float]
    parts: SecondsByPart
    seconds: float


def training_part(shape: ModelShape, device: Device, work: Workload, split: Split) -> TrainingPart:
    """Scoring, reference, critic and update on the split's ranks."""
    trainer = TrainCost(shape, device, split, work.reshard)
    found = {"old_log_prob": trainer.score(work), "update_actor": trainer.update(work)}
    if work.reference:
        found["ref"] = trainer.reference(work)
    if work.critic:
        eager = replace(work, compiled=False)  # only the policy is compiled
        found["values"], found["update_critic"] = trainer.reference(work), trainer.update(eager)
    parts = SecondsByPart()
    for stage in found.values():
        parts.add(stage)
    return TrainingPart({name: stage.total for name, stage in found.items()}, parts, parts.total)


def predict(shape: ModelShape, device: Device, work: Workload, split: Split) -> Prediction | None:
    """The step of this split; None when it does not fit into the devices' memory."""
    model = ModelSize.of(shape, device.number_bytes)
    alone = trainer_memory(model, device, work, split)
    if not alone.with_reserve(device).fits(device) or split.engines < 1:
        return None

    # Pages hold the tokens there are; a slot without them has room for the longest.
    slot_tokens = work.prompt + work.lengths.mean if device.is_gpu else work.slot_tokens

    def rollout_memory(slots: int) -> Memory:
        engine = engine_memory(model, device, work, tp=split.tp, slots=slots, slot_tokens=slot_tokens)
        if not split.separate:
            one_process = split.trainers == 1
            engine = colocated_memory(alone, engine, one_process=one_process, paged=device.is_gpu)
        return engine.with_reserve(device)

    wanted = min(float(work.slots), math.ceil(work.groups_at_once * work.group / split.engines))
    slots = most_slots(lambda n: rollout_memory(n).fits(device), wanted)
    if slots == 0:
        return None
    rollout, training = (
        _rollout_part(shape, device, work, split, slots),
        training_part(shape, device, work, split),
    )
    publish = publish_seconds(shape, device, split.trainers, split.rollout, split.separate)
    stages = {"gen": rollout.seconds, **training.stages, "update_weights": publish}
    step_s, parts = _decide(work, rollout, training, publish, stages)
    return Prediction(
        split=split,
        eta=work.eta,
        step_s=step_s,
        stages=stages,
        parts=parts,
        trainer_memory=alone.with_reserve(device) if split.separate else rollout_memory(slots),
        rollout_memory=rollout_memory(slots),
        slots=slots,
        rows=rollout.rows,
        decode_step_s=rollout.step_s,
        single_step_s=rollout.single_s,
        group_s=work.lengths.longest_of(work.group) * rollout.step_s,
        checkpoint_s=checkpoint_seconds(shape, device, split.trainers),
        trained_tokens=work.rows * work.lengths.mean,
    )


@dataclass(frozen=True)
class RolloutPart:
    """The generating part of a prediction."""

    seconds: float
    parts: SecondsByPart
    rows: float
    step_s: float
    single_s: float  # a decode step with one group alone
    longest_s: float  # until the longest answer of a step is there


def _rollout_part(shape: ModelShape, device: Device, work: Workload, split: Split, slots: int) -> RolloutPart:
    """Generation for one step: a whole batch waited for, or a stream that is never empty."""
    engine, lengths = Engine(shape, device, split.tp, work.eager), work.lengths
    context = work.prompt + lengths.residual_mean
    single = engine.step_seconds(float(work.group), context)
    if not work.eta and not work.carry:
        parts = SecondsByPart()
        for groups in work.rounds:
            asked = groups * work.group / split.engines
            parts.add(generate(engine, asked, split.engines, slots, lengths, work.prompt, work.group))
        rows = min(work.rounds[0] * work.group / split.engines, float(slots))
        return RolloutPart(parts.total, parts, rows, engine.step_seconds(rows, context), single, 0.0)
    under_way = work.groups_at_once * work.group * work.alive
    rows = min(float(slots), max(1.0, under_way / split.engines))
    speed, decode = steady(engine, rows, work.prompt, lengths, work.group)
    engines = min(float(split.engines), under_way / rows)
    answers = work.generated_groups * work.group
    seconds, step = answers * lengths.mean / (engines * speed), decode.total
    parts = decode.times(seconds / step)
    longest = lengths.longest_of(answers) * step
    if not work.eta:  # carried groups go on in the next steps' generation, not beside training
        bound = longest / (work.carry + 1)
        if bound > seconds:
            seconds, parts = bound, SecondsByPart({STALE: bound})
        return RolloutPart(seconds, parts, rows, step, single, longest)
    pause = shape.parameters * device.number_bytes / split.tp / HOST_COPY
    parts[PUBLISH] = pause
    return RolloutPart(seconds + pause, parts, rows, step, single, longest)


def _decide(
    work: Workload, rollout: RolloutPart, training: TrainingPart, publish: float, stages: dict[str, float]
) -> tuple[float, SecondsByPart]:
    """Seconds of a step and what they are spent on: the sum of the stages in turn, or the slowest of three at once.

    With η, (η+1) batches may be outstanding, one of them in training, so η batches are generated at once. A group begun
    right after a publication must be trained within η steps more: (η+1) steps hold its generation and one training.
    """
    train = SecondsByPart({**training.parts, PUBLISH: publish})
    if not work.eta:
        both = SecondsByPart(rollout.parts)
        both.add(train)
        return both.total, both
    bound = (rollout.longest_s + training.seconds + publish) / (work.eta + 1)
    stages["staleness bound"] = bound
    return max(
        (rollout.seconds, rollout.parts),
        (train.total, train),
        (bound, SecondsByPart({STALE: bound})),
        key=lambda p: p[0],
    )
