"""The memory plan of a config on this machine: what each part holds, and the stage that needs most."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from gspo.build.data.rows import held_out_share
from gspo.build.device import total_memory
from gspo.build.model_size import measure_size
from gspo.config import TrainerConfig
from gspo.data.datasets import has_held_out
from gspo.kernels.compiled_layers import MIN_PARAMETERS, has_cpp_compiler
from gspo.kernels.sizes import PAGE
from gspo.models.load import compute_dtype, load_config
from gspo.plan.constants import Chip
from gspo.plan.memory import EVALUATION, Memory, ModelSize, colocated_memory, engine_memory, trainer_memory
from gspo.plan.split import Split
from gspo.plan.workload import Workload, workload_of

GIB = 1 << 30
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

    @property
    def largest(self) -> str:
        """The largest part in the stage that needs most."""
        parts = self.memory.at_peak
        return max(parts, key=lambda name: parts[name])

    def shortage(self) -> str:
        """A sentence for a plan that does not fit."""
        return (
            f"memory: {self.memory.peak_stage} needs {in_words(self.peak)}, but only {in_words(self.available)} are "
            f"available; the largest part is {self.largest}. Lower actor.ppo_max_token_len_per_gpu or "
            "rollout.max_num_seqs, set model.enable_gradient_checkpointing=true, or train adapters (model.lora_rank)"
        )

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


def plan_memory(
    config: TrainerConfig,
    device: torch.device,
    *,
    base: int,
    available: int,
    num_val: int,
    model: ModelSize | None = None,
) -> MemoryPlan:
    """The plan of one rank that trains and generates; evaluation generates for `num_val` questions at once.

    `model` is what `model_size` returned for this config, if that was called before.
    """
    dtype = _dtype(config, device)
    model = model or model_size(config, device)
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


def model_size(config: TrainerConfig, device: torch.device) -> ModelSize:
    """What memory depends on in the config's model, measured on its modules."""
    c = config.actor_rollout_ref.model
    architecture = load_config(c.path, c.override_config, trust_remote_code=c.trust_remote_code)
    return measure_size(architecture, _dtype(config, device), c.path, c.lora_rank)


def machine_memory(device: torch.device) -> int:
    """Bytes of memory of a device."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return total_memory()


def num_held_out(config: TrainerConfig) -> int:
    """Held-out questions generated at once, assumed where the config does not limit them."""
    files, split = config.data.train_files, config.data.val_split
    names = [files] if isinstance(files, str) else files
    has_own = any(has_held_out(name, split if isinstance(split, str) else None) for name in names)
    if config.data.val_files is None and held_out_share(config) is None and not has_own:
        return 0
    return config.data.val_batch_size or config.data.num_val_samples or 512


def in_words(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if num_bytes >= GIB else f"{num_bytes / (1 << 20):.1f} MiB"


def _dtype(config: TrainerConfig, device: torch.device) -> torch.dtype:
    return getattr(torch, compute_dtype(config.actor_rollout_ref.model.dtype, device))


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
