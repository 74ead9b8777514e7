"""What a device holds, in bytes: the memory model of both `gspo plan` and `gspo doctor`.

A rank that trains holds weights, masters, moments, gradients, activations and a chunk of logits. An engine holds
weights, its KV cache, a prefill and the logits of a decode step. Some of these live only in some stages of a step, so
the stage that holds most decides. `gspo plan` estimates the model from its shape; `gspo doctor` measures it on its own
modules.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from gspo.kernels.sizes import CHUNK_ELEMENTS, FUSED_CHUNK_ELEMENTS
from gspo.models.shape import ModelShape
from gspo.plan.constants import COMPILED_KEPT, DECODE_LOGIT_COPIES, FRAGMENTATION, LOGIT_COPIES, RESERVED, Chip
from gspo.plan.split import Split, is_captured, is_offloaded
from gspo.plan.workload import Workload

FLOAT = 4
EIGHT_BIT = 1 + 4 / 256  # bytes of a moment in 8 bits, with a float32 scale per block of 256
FOUR_BIT = 0.5 + 4 / 64  # bytes of a weight in 4 bits, with a float32 scale per block of 64
GENERATION, EVALUATION = GENERATING = ("generation", "evaluation")
UPDATE, CRITIC_UPDATE, SCORING = TRAINING = ("update", "critic update", "scoring")
STAGES = (*GENERATING, *TRAINING)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What memory depends on in a model. `layer_kept` and `other_kept`: bytes per token kept for the backward."""

    shape: ModelShape
    parameters: int
    trained: int
    layer_kept: float  # by one layer
    other_kept: float  # beside the layers

    @staticmethod
    def of(shape: ModelShape, number_bytes: int) -> ModelSize:
        """Estimated from the shape, all parameters trained."""
        return ModelSize(
            shape, shape.parameters, shape.parameters, shape.kept_bytes(number_bytes), 3.0 * shape.hidden * number_bytes
        )


@dataclass(frozen=True)
class Memory:
    """Bytes of one device by part. A part is held all the time, or in the stages that `only` names for it."""

    held: Mapping[str, float]
    only: Mapping[str, Collection[str]] = field(default_factory=dict)
    on_host: float = 0.0  # what the optimiser keeps in host memory instead

    def in_stage(self, stage: str) -> dict[str, float]:
        """The parts held in one stage."""
        return {name: size for name, size in self.held.items() if stage in self.only.get(name, STAGES)}

    @property
    def stages(self) -> dict[str, float]:
        """Bytes by stage, of the stages that this device takes part in."""
        named = {stage for stages in self.only.values() for stage in stages}
        return {stage: sum(self.in_stage(stage).values()) for stage in STAGES if stage in named or not named}

    @property
    def peak_stage(self) -> str:
        stages = self.stages
        return max(stages, key=lambda stage: stages[stage])

    @property
    def at_peak(self) -> dict[str, float]:
        """The parts held in the stage that holds most; they add up to `total`."""
        return self.in_stage(self.peak_stage)

    @property
    def total(self) -> float:
        return max(self.stages.values())

    def with_reserve(self, chip: Chip) -> Memory:
        """With what the libraries and the allocator of a GPU need for themselves."""
        if not chip.is_gpu:
            return self
        spare = (FRAGMENTATION - 1) * (self.total + RESERVED)
        held = {**self.held, "libraries": float(RESERVED), "fragmentation": spare}
        return Memory(held, self.only, self.on_host)

    def fits(self, chip: Chip) -> bool:
        return self.total <= chip.memory


def trainer_memory(model: ModelSize, chip: Chip, work: Workload, split: Split) -> Memory:
    """Of one rank that trains."""
    shape, size = model.shape, chip.number_bytes
    held, on_host = _weights(model, chip, work, split)
    forward = work.largest_forward(split.trainers, packed=chip.is_half_gpu)
    captured = is_captured(shape, chip, work, split)
    sums, narrow = _gradient_bytes(size, forward.is_only and split.trainers == 1, captured)
    if sums:
        held["gradients"] = sums * model.trained / split.shard
    held["activations of a micro-batch"] = forward.tokens * _kept(model, size, split.checkpointing, captured)
    held["temporaries of a layer"] = forward.tokens * _temporaries(shape, size)
    held["logits of a chunk"] = logits_bytes(shape, chip, forward.responses * work.lengths.longest)
    only: dict[str, Collection[str]] = {
        "gradients": (UPDATE,),
        "logits of a chunk": (UPDATE, SCORING),
        "temporaries of a layer": TRAINING if work.critic else (UPDATE, SCORING),
    }
    if captured:  # a CUDA graph keeps its memory to itself, whatever runs meanwhile
        held["gradients in CUDA graphs"] = float(narrow * model.trained)
    else:
        only["activations of a micro-batch"] = (UPDATE,)
    if work.critic:  # its layers are not compiled
        sums, _ = _gradient_bytes(size, forward.is_only and split.trainers == 1, captured=False)
        held["gradients of the critic"] = sums * model.parameters / split.shard
        held["activations of the critic"] = forward.tokens * _kept(model, size, split.checkpointing, False)
        only["gradients of the critic"] = only["activations of the critic"] = (CRITIC_UPDATE,)
    return Memory(held, only, on_host)


def engine_memory(model: ModelSize, chip: Chip, work: Workload, *, tp: int, slots: float, slot_tokens: float) -> Memory:
    """Of one of the `tp` devices of an engine with `slots` slots and a cache of `slot_tokens` tokens for each."""
    shape, size = model.shape, chip.number_bytes
    # Pages are written in place; without them a prefill makes its keys and values first.
    prefill = _temporaries(shape, size) + (0 if chip.is_gpu else shape.kv_bytes(size))
    held = {
        "parameters": parameter_bytes(model, size, work) / tp,
        "KV cache": slots * slot_tokens * shape.kv_bytes(size) / tp,
        "prefill": min(work.prefill_tokens, slots * work.longest_prompt) * prefill / tp,
        "logits of a step": DECODE_LOGIT_COPIES * slots * shape.vocab * FLOAT / tp,
    }
    only: dict[str, Collection[str]] = {"prefill": GENERATING}
    if not chip.is_gpu or work.eager:  # else a CUDA graph keeps them
        only["logits of a step"] = GENERATING
    return Memory(held, only)


def colocated_memory(trainer: Memory, engine: Memory, chip: Chip, *, one_process: bool) -> Memory:
    """Both on one device. In one process the engine uses the trainer's weights, and its cache stays during training.

    In another process it has its own weights; on a GPU it frees its cache while the trainer works.
    """
    parts = {name: size for name, size in engine.held.items() if name != "parameters"}
    only = {**trainer.only, **engine.only}
    if not one_process:
        if chip.is_gpu:
            only |= dict.fromkeys(parts, GENERATING)
        parts["engine's weights"] = engine.held["parameters"]
    return Memory({**trainer.held, **parts}, only, trainer.on_host)


def most_slots(fits: Callable[[int], bool], wanted: float) -> int:
    """The largest number of slots up to `wanted` that fits; 0 when not even one does."""
    sizes = range(1, int(max(1.0, wanted)) + 1)
    return bisect_left(sizes, True, key=lambda slots: not fits(slots))


def logits_bytes(shape: ModelShape, chip: Chip, targets: float) -> float:
    """One chunk of the output head in float32.

    The fused head of a GPU holds a chunk's logits with their narrow gradient, and the weight's gradient in float32. The
    plain head holds copies of a smaller chunk, and float32 weights where they are narrower.
    """
    size = chip.number_bytes
    if chip.is_half_gpu:
        chunk = min(targets, max(1, FUSED_CHUNK_ELEMENTS // shape.vocab))
        return chunk * shape.vocab * (FLOAT + size) + shape.head_parameters * FLOAT
    chunk = min(targets, max(1, CHUNK_ELEMENTS // shape.vocab))
    return LOGIT_COPIES * chunk * shape.vocab * FLOAT + (shape.head_parameters * FLOAT if size < FLOAT else 0)


def parameter_bytes(model: ModelSize, size: int, work: Workload) -> float:
    """Of the weights of one copy of the model; those of its layers in 4 bits where that is asked for."""
    shape = model.shape
    narrow = min(shape.layers * shape.layer_parameters, model.parameters) if work.four_bit else 0
    return float(size * (model.parameters - narrow) + FOUR_BIT * narrow)


def _weights(model: ModelSize, chip: Chip, work: Workload, split: Split) -> tuple[dict[str, float], float]:
    """What stays from the first step to the last, by part; and the bytes of it that are kept in host memory.

    A rank alone holds whole weights. One of several holds a shard of the masters, and two gathered layers at a time.
    """
    size, shape, shard = chip.number_bytes, model.shape, split.shard
    masters = FLOAT if size < FLOAT else 0
    held: dict[str, float] = {}
    if shard == 1:
        held["parameters"] = parameter_bytes(model, size, work)
        optimizer = {"float32 masters": float(masters * model.trained)} if masters else {}
    else:
        held["parameters"] = FLOAT * model.parameters / shard
        ends = shape.head_parameters * (1 if shape.tied else 2)
        held["gathered layers"] = float(size * (2 * shape.layer_parameters + ends))
        optimizer = {}
    optimizer["optimiser"] = 2 * (EIGHT_BIT if work.eight_bit else FLOAT) * model.trained / shard
    on_host = sum(optimizer.values()) if is_offloaded(chip, work, split) else 0.0
    if not on_host:
        held |= optimizer
    if work.reference and not work.shares_reference:
        held["reference"] = size * model.parameters / shard
    if work.critic:
        held["critic"] = (size + masters + 2 * FLOAT) * model.parameters / shard
    return held, on_host


def _gradient_bytes(size: int, is_one: bool, captured: bool) -> tuple[int, int]:
    """Of a parameter: (gradients of an update, float32 unless of a single micro-batch; those that a CUDA graph keeps)."""
    if captured:
        return (0 if is_one else FLOAT), size
    return (size if is_one else FLOAT), 0


def _kept(model: ModelSize, size: int, checkpointing: bool, captured: bool) -> float:
    """Bytes per token kept for the backward; with checkpointing each layer's input and the one layer recomputed."""
    shape = model.shape
    if checkpointing:
        return shape.layers * shape.hidden * size + model.layer_kept + model.other_kept
    return shape.layers * model.layer_kept * (COMPILED_KEPT if captured else 1.0) + model.other_kept


def _temporaries(shape: ModelShape, size: int) -> float:
    """Bytes per token that a layer's forward or backward uses and frees: its widest tensors and their products."""
    return size * (3 * shape.mlp_width + 4 * shape.hidden)
