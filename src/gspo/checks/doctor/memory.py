"""The memory plan of a config on this machine: what each part holds, and the stage that needs most."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from gspo.checks.doctor.model_size import measure_size
from gspo.config import TrainerConfig
from gspo.kernels.compiled_layers import MIN_PARAMETERS, has_cpp_compiler
from gspo.kernels.sizes import PAGE
from gspo.models.load import compute_dtype, load_config
from gspo.plan.constants import Chip
from gspo.plan.memory import EVALUATION, Memory, ModelSize, colocated_memory, engine_memory, trainer_memory
from gspo.plan.split import Split
from gspo.plan.workload import Workload, workload_of

COMPILER = 200 << 20  # bytes that torch's compiler and its code take in a process on a CPU


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a run needs and what the device has. `base`: the program and its libraries."""

    memory: Memory
    base: int
    available: int

    @property
    def peak(self) -> int:
        return self.base + int(self.memory.total)

    @property
    def fits(self) -> bool:
        return self.peak <= self.available

    def to_dict(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "base": self.base,
            "held": {name: int(size) for name, size in memory.held.items()},
            "stages": {name: int(size) for name, size in memory.stages.items()},
            "peak_stage": memory.peak_stage,
            "peak": self.peak,
            "available": self.available,
            "fits": self.fits,
            "on_host": int(memory.on_host),
        }


def plan_memory(config: TrainerConfig, device: torch.device, *, base: int, available: int, num_val: int) -> MemoryPlan:
    """The plan of one rank that trains and generates; evaluation generates for `num_val` questions at once."""
    c = config.actor_rollout_ref.model
    dtype = getattr(torch, compute_dtype(c.dtype, device))
    architecture = load_config(c.path, c.override_config, trust_remote_code=c.trust_remote_code)
    model = measure_size(architecture, dtype, c.path, c.lora_rank)
    chip = Chip(device.type, available, number_bytes=dtype.itemsize)
    work, split = workload_of(config), Split.of(config)
    if config.actor_rollout_ref.actor.strategy != "local":  # even a single rank of FSDP does neither
        work = replace(work, compiled=False, offload=False)
    trainer = trainer_memory(model, chip, work, split)
    engine = _engine(config, model, chip, work, num_val)
    memory = colocated_memory(trainer, engine, chip, one_process=split.trainers == 1)
    compiles = work.compiled and not model.shape.experts and dtype == torch.float32
    if not chip.is_gpu and compiles and model.parameters >= MIN_PARAMETERS and has_cpp_compiler():
        base += COMPILER
    return MemoryPlan(memory, base, available)


def _engine(config: TrainerConfig, model: ModelSize, chip: Chip, work: Workload, num_val: int) -> Memory:
    """The native engine as it allocates: on a GPU pages for all slots, within its share of the memory.

    On a CPU a slot that never runs costs nothing, and evaluation uses separate slots.
    """
    rollout, token_bytes = config.actor_rollout_ref.rollout, model.shape.kv_bytes(chip.number_bytes)
    if chip.is_gpu:
        most = rollout.gpu_memory_utilization * chip.memory / token_bytes / work.slots
        slot_tokens = min(work.slot_tokens + 2 * PAGE, most)
        return engine_memory(model, chip, work, tp=1, slots=work.slots, slot_tokens=slot_tokens)
    running = min(work.slots, work.groups_at_once * work.group_size)
    engine = engine_memory(model, chip, work, tp=1, slots=running, slot_tokens=work.slot_tokens)
    val_rows = min(work.slots, num_val * rollout.val_kwargs.n)
    cache = {"KV cache of the evaluation": float(val_rows * work.slot_tokens * token_bytes)}
    return Memory({**engine.held, **cache}, {**engine.only, **dict.fromkeys(cache, (EVALUATION,))})
