"""How the devices of a cluster are split between training and generation, and what that means for a rank."""

from __future__ import annotations

from dataclasses import dataclass

from gspo.config import TrainerConfig
from gspo.models.shape import ModelShape
from gspo.plan.constants import Chip
from gspo.plan.workload import Workload


@dataclass(frozen=True, slots=True)
class Split:
    """Without `separate` every device trains and generates. `tp` devices share an engine, `shard` ranks a model."""

    trainers: int = 1
    rollout: int = 1
    separate: bool = False
    tp: int = 1
    shard: int = 1
    checkpointing: bool = False

    @staticmethod
    def of(config: TrainerConfig) -> Split:
        """The split that a config asks for."""
        trainer, actor, rollout = (config.trainer, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout)
        ranks = trainer.nnodes * (trainer.n_gpus_per_node or 1) if actor.strategy == "fsdp2" else 1
        separate = rollout.mode == "async" and rollout.max_head_offpolicyness > 0
        tp = rollout.tensor_model_parallel_size
        size = actor.fsdp_config.fsdp_size
        return Split(
            trainers=ranks,
            rollout=rollout.num_workers * tp if separate else ranks,
            separate=separate,
            tp=tp,
            shard=ranks if size < 1 else min(size, ranks),
            checkpointing=config.actor_rollout_ref.model.enable_gradient_checkpointing,
        )

    @property
    def engines(self) -> int:
        return self.rollout // self.tp

    @property
    def devices(self) -> int:
        return self.trainers + self.rollout if self.separate else self.trainers


def is_compiled(shape: ModelShape, chip: Chip, work: Workload, split: Split) -> bool:
    """Whether a GPU runs the policy's layers compiled: dense, packed, in half precision, with whole weights."""
    whole = split.trainers == 1 and not shape.experts
    return whole and work.compiled and work.layout != "plain" and chip.is_half_gpu


def is_captured(shape: ModelShape, chip: Chip, work: Workload, split: Split) -> bool:
    """Whether forward and backward are captured as CUDA graphs: compiled, and nothing is recomputed."""
    return is_compiled(shape, chip, work, split) and not split.checkpointing


def is_offloaded(chip: Chip, work: Workload, split: Split) -> bool:
    """Whether masters and moments are kept in host memory."""
    return work.offload and split.trainers == 1 and chip.is_gpu
