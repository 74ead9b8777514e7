"""The time of training: scoring, update and FSDP communication, for a mini-batch spread over ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from gspo.kernels.sizes import KEEP_ELEMENTS
from gspo.models.shape import ModelShape
from gspo.plan import constants
from gspo.plan.constants import Device
from gspo.plan.seconds_by_part import SecondsByPart
from gspo.plan.split import Split, is_captured, is_compiled, is_offloaded
from gspo.plan.transfers import gather_seconds, reduce_seconds
from gspo.plan.workload import Workload

PRODUCTS, HEAD, TRAFFIC = ("matrix products of training", "output head in training", "memory traffic of training")
ATTENTION = "attention in training"
LAUNCH, OPTIMIZER, EXCHANGE = "launching training kernels", "optimiser", "FSDP communication"
UNEVEN = "imbalance between ranks"


@dataclass(frozen=True)
class TrainCost:
    """Seconds of training on the ranks of a split."""

    shape: ModelShape
    device: Device
    split: Split = field(default_factory=Split)

    def score(self, work: Workload) -> SecondsByPart:
        """Seconds to compute π_old: a forward over the share of the batch that needs one."""
        return self._passes(work, work.score_share)

    def reference(self, work: Workload) -> SecondsByPart:
        """Seconds of a forward of the reference over the whole batch."""
        return self._passes(work, 1.0, policy=False)

    def update(self, work: Workload) -> SecondsByPart:
        """Seconds of all optimiser steps: forward, backward (two forwards), recomputation and communication."""
        body = 4 if self.split.checkpointing else 3
        logits = work.targets / work.mini_batches / self.split.trainers * self.shape.vocab
        head = 4 if self.device.is_half_gpu or logits > KEEP_ELEMENTS else 3
        scatter = 4 / self.device.number_bytes  # gradients are reduced in float32
        gathers = (2 if work.reshard else 1) + scatter
        parts = self._passes(work, float(work.epochs), body, head, gathers)
        shard = self.split.shard
        reduce = reduce_seconds(self.device, self.split.trainers // shard, 4.0 * self.shape.parameters / shard)
        parts.add({OPTIMIZER: self._optimizer(work), EXCHANGE: reduce}, work.epochs * work.mini_batches)
        return parts

    def _passes(
        self, work: Workload, share: float, body: int = 1, head: int = 1, gathers: float = 1, policy: bool = True
    ) -> SecondsByPart:
        """Seconds of `share` batches: `body` forwards of the layers, `head` of the output head, `gathers` exchanges."""
        if share <= 0:
            return SecondsByPart()
        part = 1 / (work.mini_batches * self.split.trainers)  # one rank's share of a mini-batch, of the batch
        tokens = work.train_tokens * part
        longest = work.mean_prompt + work.lengths.longest_of(work.rows / work.mini_batches)
        own = max(tokens, min(longest, float(work.longest)))
        compiled = policy and is_compiled(self.shape, self.device, work, self.split)
        compute = self._compute(work, part, tokens, body, head, compiled)
        scale = own / tokens
        micros = math.ceil(own / max(work.token_budget, longest))
        launches = (
            self.shape.layers * constants.KERNELS_LAYER * constants.KERNEL_S * micros * body / self.device.train_share
        )
        if policy and is_captured(self.shape, self.device, work, self.split):
            launches *= constants.CAPTURED_SHARE
        if not self.device.is_gpu:
            launches = 0.0  # part of the products: the host is the device
        size = float(self.shape.parameters * self.device.number_bytes)
        # FSDP gathers weights and scatters gradients once per micro-batch.
        exchange = micros * gathers * gather_seconds(self.device, self.split.shard, size, self.shape.layers)
        hidden = min(exchange, constants.OVERLAP * (compute.total * scale + launches))
        other = {UNEVEN: compute.total * (scale - 1), LAUNCH: launches, EXCHANGE: exchange - hidden}
        return SecondsByPart({**compute, **other}).times(share * work.mini_batches)

    def _compute(
        self, work: Workload, part: float, tokens: float, body: float, head: float, compiled: bool
    ) -> SecondsByPart:
        s, d = self.shape, self.device
        reached = constants.COMPILED_TRAIN_SHARE if compiled else d.train_share
        targets = work.targets * part
        products = tokens * 2 * s.active_body
        attention = s.attention_operations(work.train_pairs * part)
        kept = tokens * s.layers * s.kept_bytes(d.number_bytes)
        traffic = body * constants.TRAFFIC_PASSES * kept + head * constants.LOGIT_PASSES * targets * s.vocab * 4
        return SecondsByPart(
            {
                PRODUCTS: body * products / d.matmul / reached,
                ATTENTION: body * attention / d.attention_rate,
                HEAD: head * 2.0 * targets * s.head_parameters / d.head_rate / reached,
                TRAFFIC: traffic / d.reached_bandwidth / reached,
            }
        )

    def _optimizer(self, work: Workload) -> float:
        """AdamW is limited by memory bandwidth, or by the copies of masters and moments that are kept in host memory."""
        d, numbers = self.device, self.shape.parameters / self.split.shard
        own = constants.OPTIMIZER_BYTES * numbers / d.reached_bandwidth / d.train_share
        if not is_offloaded(d, work, self.split):
            return own
        return max(own, (12 if d.number_bytes < 4 else 8) * numbers / constants.OFFLOAD_COPY)
