"""Memory a device: what a trainer's rank and an engine's device hold, by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gspo.kernels.sizes import FUSED_CHUNK_ELEMENTS
from gspo.models.shape import ModelShape
from gspo.plan.constants import (
    COMPILED_KEPT,
    FRAGMENTATION,
    LOGIT_COPIES,
    RESERVED,
    Device,
)
from gspo.plan.train_time import TrainCost, chunk_rows
from gspo.plan.workload import Workload

FLOAT = 4
TRAINING = ("activations of a micro-batch", "temporaries of a layer", "logits of a chunk", "gradients")


@dataclass(frozen=True)
class Memory:
    """Bytes of one device by what holds them."""

    held: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return sum(self.held.values())

    def with_reserve(self, device: Device) -> Memory:
        """With what the libraries and the allocator take for themselves."""
        if device.name == "cpu":
            return self
        held = {**self.held, "libraries": float(RESERVED)}
        return Memory({**held, "fragmentation": (FRAGMENTATION - 1) * sum(held.values())})

    def fits(self, device: Device) -> bool:
        return self.total <= device.memory


def trainer_memory(
    shape: ModelShape, device: Device, work: Workload, *, ranks: int, shard: int, checkpointing: bool
) -> Memory:
    """Of one rank in a shard group of `shard`: one rank alone keeps whole weights, several a shard and two layers."""
    size, numbers = device.number_bytes, shape.parameters
    held: dict[str, float] = {}
    trainer = TrainCost(shape, device, ranks, shard, checkpointing)
    offloaded = trainer.offloads(work)
    if shard == 1:
        held["parameters"] = float(size * numbers)
        if size < FLOAT and not offloaded:
            held["float32 masters"] = float(FLOAT * numbers)
    else:
        held["parameters"] = (
            FLOAT * numbers / shard
        )  # the masters themselves; the narrow copy is what is gathered
        ends = shape.head * (1 if shape.tied else 2)
        held["gathered layers"] = float(size * (2 * shape.layer_parameters + ends))
    if not offloaded:
        held["optimiser"] = 2 * FLOAT * numbers / shard
    held["gradients"] = gradient_bytes(trainer, work) * numbers / shard
    if work.reference:
        held["reference"] = size * numbers / shard
    if work.critic:
        held["critic"] = (size + 3 * FLOAT + (FLOAT if size < FLOAT else 0)) * numbers / shard
    tokens = micro_tokens(work, ranks)
    kept = shape.kept_bytes(size)
    if checkpointing:  # each layer's input, and all of one: what it does not keep its backward makes again
        layers = shape.layers * shape.hidden * size + kept
    else:
        layers = shape.layers * kept * (COMPILED_KEPT if trainer.compiles(work) else 1.0)
    transient = size * (3 * widest(shape) + 4 * shape.hidden)
    held["activations of a micro-batch"] = tokens * (layers + 3 * shape.hidden * size)
    held["temporaries of a layer"] = tokens * transient
    held["logits of a chunk"] = logits_bytes(
        shape, device, tokens * work.lengths.longest / work.longest, work.fused_head
    )
    return Memory(held)


def gradient_bytes(trainer: TrainCost, work: Workload) -> int:
    """A parameter: float32 sums, beside the narrow gradients that graphs write; those of one micro-batch are their own sums."""
    size = trainer.device.number_bytes
    if trainer.ranks == 1 and work.is_one_micro_batch:
        return size
    return FLOAT + (size if trainer.captures(work) else 0)


def engine_memory(shape: ModelShape, device: Device, work: Workload, *, tp: int, slots: float) -> Memory:
    """Of one of the `tp` devices of an engine with so many slots."""
    size = device.number_bytes
    length = work.prompt + work.lengths.mean if is_paged(device, work) else work.longest
    held = {
        "parameters": size * shape.parameters / tp,
        "KV cache": slots * length * shape.kv_bytes(size) / tp,
        "prefill": min(work.prefill_tokens, slots * work.longest_prompt)
        * (size * (3 * widest(shape) + 4 * shape.hidden) + shape.kv_bytes(size))
        / tp,
        "logits of a step": LOGIT_COPIES * slots * shape.vocab * FLOAT / tp,
    }
    return Memory(held)


def colocated_memory(trainer: Memory, engine: Memory, *, one_process: bool, paged: bool) -> Memory:
    """Both on one device; in one process the engine reads the trainer's weights.

    There its cache stays while the trainer works, which takes what a prefill freed; a paged one of another process
    sleeps.
    """
    held = dict(trainer.held)
    other = {name: size for name, size in engine.held.items() if name != "parameters"}
    if one_process:
        beyond = other.pop("prefill", 0.0) - sum(held[n] for n in TRAINING)
        return Memory({**held, **other, **({"prefill": beyond} if beyond > 0 else {})})
    held["engine's weights"] = engine.held["parameters"]
    if paged:
        training = sum(held.pop(n) for n in TRAINING)
        generating = sum(other.values())
        name = "generation (cache, prefill)" if generating > training else "training (activations, gradients)"
        held[name] = max(training, generating)
        return Memory(held)
    return Memory({**held, **other})


def most_slots(fits: Callable[[int], bool], wanted: float) -> int:
    """The largest number of slots up to `wanted` that fits; 0 when not even one does."""
    low, high = 0, int(max(1.0, wanted))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def micro_tokens(work: Workload, ranks: int) -> float:
    """Tokens of a rank's largest forward, all answers as long as can be: the budget, but one answer at least."""
    share = work.rows / work.mini_batches / ranks * work.longest
    return max(float(work.longest), min(share, float(work.token_budget)))


def widest(shape: ModelShape) -> int:
    """Width of the MLP a token passes."""
    if shape.experts:
        return shape.experts_per_token * shape.expert_intermediate + shape.shared_intermediate
    return shape.intermediate


def is_paged(device: Device, work: Workload) -> bool:
    """Whether the cache is pages: on a GPU, unless it cannot be."""
    return work.paged and device.name != "cpu"


def logits_bytes(shape: ModelShape, device: Device, targets: float, fused: bool) -> float:
    """One chunk of the head in float32, and what is wide beside it when the weights are narrow.

    The fused head keeps a chunk's logits and their narrow gradient, and the weight's gradient in float32; the plain one
    some copies of a smaller chunk, and the weights raised to float32.
    """
    size = device.number_bytes
    if fused and size < FLOAT:
        chunk = min(targets, FUSED_CHUNK_ELEMENTS // shape.vocab)
        return chunk * shape.vocab * (FLOAT + size) + shape.head * FLOAT
    chunk = min(targets, chunk_rows(shape.vocab))
    return LOGIT_COPIES * chunk * shape.vocab * FLOAT + (shape.head * FLOAT if size < FLOAT else 0)
